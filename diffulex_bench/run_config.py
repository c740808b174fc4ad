"""``config.yaml`` of a run as a configuration again: what nobody wrote is told from what somebody wrote.

The file holds every resolved value. Its section ``origins`` says where each came from, and
``origins.values`` what those were that no user wrote and that differ from the default. A value counts as
written unless both agree that it is not, so an edited one always counts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffulex.settings.spec import settings_of

if TYPE_CHECKING:
    from diffulex.settings.sources import Sections
    from diffulex.settings.yaml_files import YamlFile

ORIGINS = "origins"
VALUES = "values"
_WRITTEN = ("yaml ", "flag ", "--set ", "keyword", "model_args")

#: Section -> rows of name as in YAML, value and origin.
Rows = Mapping[str, list[tuple[str, Any, str]]]


def origins_section(rows: Rows, sections: Sections) -> dict[str, Any]:
    """The section ``origins`` of a run's ``config.yaml`` that holds the settings ``rows``."""
    values: dict[str, dict[str, object]] = {}
    for section, types in sections.items():
        defaults = _defaults(types)
        values[section] = {
            name: plain(value)
            for name, value, origin in rows[section]
            if not origin.startswith(_WRITTEN) and not _same(plain(value), defaults[name])
        }
    origins = {section: {name: origin for name, _, origin in rows[section]} for section in rows}
    return {**origins, VALUES: values}


def without_derived(file: YamlFile, sections: Sections) -> YamlFile:
    """The file without its ``origins`` and without the values that nobody wrote; others stay as they are."""
    if ORIGINS not in file.content:
        return file
    content = dict(file.content)
    noted = _mapping(content.pop(ORIGINS))
    values = _mapping(noted.get(VALUES))
    for section, types in sections.items():
        written = content.get(section)
        if not isinstance(written, Mapping):
            continue
        origins, known = _mapping(noted.get(section)), _defaults(types) | _mapping(values.get(section))
        content[section] = {
            key: value for key, value in written.items() if not _is_derived(str(key), value, origins, known)
        }
    return dataclasses.replace(file, content=content)


def plain(value: object) -> object:
    """``value`` as YAML holds it: lists for tuples, plain mappings."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return value


def _is_derived(key: str, value: object, origins: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return (
        key in origins
        and not str(origins[key]).startswith(_WRITTEN)
        and key in known
        and _same(value, known[key])
    )


def _defaults(types: Any) -> dict[str, Any]:
    return {info.file_name: plain(info.default) for info in settings_of(*types).values()}


def _mapping(value: object) -> dict[str, Any]:
    return {str(key): one for key, one in value.items()} if isinstance(value, Mapping) else {}


def _same(one: object, other: object) -> bool:
    """Equal in value and type, so that 1 is not true."""
    return json.dumps(one, default=str, sort_keys=True) == json.dumps(other, default=str, sort_keys=True)
