"""YAML files with line numbers: what stands where, and every fault of form a file has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["YamlFile", "parse_scalar", "read_yaml"]


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, reading 1e-3 as a number and a date as text."""


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(slots=True)
class YamlFile:
    """The content of one file. `lines` maps the path of each key ("engine.block_size") to its line."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def where(self, key: str) -> str:
        """The place of a key as "file:line"."""
        line = self.lines.get(key)
        return f"{self.path}:{line}" if line is not None else str(self.path)


def read_yaml(path: Path) -> YamlFile:
    """The file's content and lines; what is wrong with its form stands in `faults` and never raises."""
    found = YamlFile(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        found.faults.append(f"{path} cannot be read: {error.strerror or error}; check the path")
        return found
    except UnicodeDecodeError as error:
        found.faults.append(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}")
        return found
    try:
        node = yaml.compose(text, _Loader)
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        found.faults.append(f"{place}: no valid YAML: {error.problem or error.context}")
        return found
    except yaml.YAMLError as error:
        found.faults.append(f"{path}: no valid YAML: {error}")
        return found
    if node is None:
        found.faults.append(f"{path} is empty; write at least an engine section with model_path")
    elif not isinstance(node, yaml.MappingNode):
        found.faults.append(f"{path} must hold sections such as engine: and eval:, it holds {content!r}")
    else:
        _note_lines(found, node, "")
        found.content = content
    return found


def _note_lines(found: YamlFile, node: yaml.MappingNode, prefix: str) -> None:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            found.faults.append(f"{found.path}:{line}: a key must be a plain name")
            continue
        key = f"{prefix}{key_node.value}"
        if key in found.lines:
            found.faults.append(
                f"{found.path}:{line}: {key} stands twice, first in line {found.lines[key]}; keep one of them"
            )
            continue
        found.lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(found, value_node, f"{key}.")


def parse_scalar(text: str) -> object:
    """A value as it would read in a file: "16" is a number, "null" nothing, "[1, 2]" a list.

    Raises:
        ValueError: the text is no YAML.
    """
    try:
        value: object = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"cannot be read as a value: {text!r}") from error
    return value
