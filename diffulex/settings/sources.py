"""Settings from YAML files and from overrides of the command line: `load_yaml` reads them as one layer.

Sections are named groups of settings, "engine" and "eval" in the bench. Every fault of every file is reported
together, with file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffulex.logger import get_logger
from diffulex.settings.aliases import disagreement, present_name, rename, renamed_value
from diffulex.settings.layers import Layer
from diffulex.settings.spec import ConfigError, SettingInfo, check_value, settings_of, unknown_name
from diffulex.settings.yaml_files import YamlFile, parse_scalar, read_yaml
from diffulex.utils.registry import did_you_mean

__all__ = ["Sections", "load_yaml", "read_layer"]

logger = get_logger(__name__)

# Section name -> the setting classes that make it up.
Sections = Mapping[str, Sequence[type]]


def load_yaml(paths: Sequence[str | Path], overrides: Sequence[str], sections: Sections) -> Layer:
    """The settings of YAML files and of overrides such as "engine.block_size=16", later ones winning.

    Files may refer to other values as ``${engine.block_size}``.

    Raises:
        ConfigError: a file cannot be read, a key stands twice or is unknown, or a value has the wrong type;
            all faults of all files are listed.
    """
    layer, faults = read_layer(paths, overrides, sections)
    if faults:
        raise ConfigError(faults)
    return layer


def read_layer(
    paths: Sequence[str | Path],
    overrides: Sequence[str],
    sections: Sections,
    prepare: Callable[[YamlFile], YamlFile] | None = None,
) -> tuple[Layer, list[str]]:
    """What `load_yaml` reads, without the settings that are faulty, and all faults.

    For a caller that goes on to check the other settings, so that a user sees every fault at once.
    ``prepare`` may change the content of each file before it is checked and merged with the others.
    """
    reader = _Reader(sections)
    files = [read_yaml(Path(path)) for path in paths]
    contents = reader.files([prepare(file) for file in files] if prepare else files)
    contents += [reader.override(text) for text in overrides]
    merged = reader.merged(contents)
    values = {
        section: reader.checked(section, reader.flattened(section, written))
        for section, written in merged.items()
    }
    origins = {
        section: {name: reader.writers[f"{section}.{name}"] for name in written}
        for section, written in values.items()
    }
    return Layer(values, origins), reader.faults


class _Reader:
    """Collects, while sources are read in order, all faults and the last writer of every setting.

    `writers` and `ranks` are keyed by path ("engine.block_size", with inner keys as in
    "engine.decoding_thresholds.edit_threshold"); a rank is the writer's place in the order of sources.
    """

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.faults: list[str] = []
        self.writers: dict[str, str] = {}
        self.ranks: dict[str, int] = {}
        self.num_sources = 0

    def files(self, files: Sequence[YamlFile]) -> list[dict[str, Any]]:
        """The known settings of each file, under their present names."""
        self.faults += [fault for file in files for fault in file.faults]
        return [self._file(file) for file in files]

    def _file(self, file: YamlFile) -> dict[str, Any]:
        known: dict[str, Any] = {}
        self.num_sources += 1
        for section, content in file.content.items():
            if section not in self.sections:
                self.faults.append(f"{file.where(str(section))}: {self._unknown_section(str(section))}")
            elif content is not None and not isinstance(content, Mapping):
                self.faults.append(
                    f"{file.where(section)}: {section} must hold settings, it holds {content!r}"
                )
            else:
                written = {str(key): value for key, value in (content or {}).items()}
                keys = [*written, *_inner_keys(written)]
                origins = {key: f"yaml {file.where(f'{section}.{key}')}" for key in keys}
                known[section] = self._settings(section, written, origins)
        return known

    def override(self, text: str) -> dict[str, Any]:
        """The setting that an override such as "engine.block_size=16" writes."""
        key, separator, raw = text.partition("=")
        section, dot, name = key.strip().partition(".")
        origin = f"--set {text}"
        if not separator or not dot or not name:
            self.faults.append(f"{origin}: write SECTION.NAME=VALUE, as in engine.block_size=16")
            return {}
        if section not in self.sections:
            self.faults.append(f"{origin}: {self._unknown_section(section)}")
            return {}
        try:
            value = parse_scalar(raw)
        except ValueError as error:
            self.faults.append(f"{origin}: {error}")
            return {}
        self.num_sources += 1
        outer, *inner = name.split(".")
        for part in reversed(inner):
            value = {part: value}
        written = {outer: value}
        origins = dict.fromkeys([outer, *_inner_keys(written)], origin)
        return {section: self._settings(section, written, origins)}

    def _settings(
        self, section: str, written: Mapping[str, Any], origins: Mapping[str, str]
    ) -> dict[str, Any]:
        """The known settings among `written`, under their present names; the others become faults."""
        infos = settings_of(*self.sections[section])
        values, deprecated, problems = rename(written)
        by_name: dict[str, str] = {}
        for key, origin in origins.items():
            by_name.setdefault(present_name(key), origin)
        paths = {f"{section}.{name}": origin for name, origin in by_name.items()}
        self.writers |= paths
        self.ranks |= dict.fromkeys(paths, self.num_sources)
        self.faults += [f"{_place(by_name[name])}: {text}" for name, text in problems]
        known = {}
        for name, value in values.items():
            if name in infos:
                known[name], old_value = renamed_value(name, value)
                deprecated += [] if old_value is None else [old_value]
            else:
                self.faults.append(f"{_place(by_name[name])}: {self._unknown_key(section, name)}")
        for line in deprecated:
            logger.warning("%s", line)
        return known

    def merged(self, contents: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """All contents merged, with references to other values replaced by them."""
        if not contents:
            return {}
        try:
            merged = OmegaConf.merge(*(OmegaConf.create(dict(content)) for content in contents))
            plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key = error.full_key or ""
            origin = self.writers.get(".".join(key.split(".")[:2]))
            place = f"{_place(origin)}: " if origin else ""
            self.faults.append(f"{place}{key}: {(error.msg or str(error)).splitlines()[0]}")
            return {}
        assert isinstance(plain, dict)
        return {str(section): dict(values) for section, values in plain.items()}

    def flattened(self, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with those of `decoding_thresholds` as flat settings; the later writer of two wins.

        Two values from one source are a fault.
        """
        flat = dict(values)
        for name, info in settings_of(*self.sections[section]).items():
            inner = values.get(name)
            if not is_dataclass(info.kind) or not isinstance(inner, Mapping):
                continue
            del flat[name]
            known, outer_path = settings_of(info.kind), f"{section}.{name}"
            for key, value in inner.items():
                path, flat_path = f"{outer_path}.{key}", f"{section}.{key}"
                writer = self.writers.get(path, self.writers[outer_path])
                rank = self.ranks.get(path, self.ranks[outer_path])
                if key not in known:
                    self.faults.append(f"{_place(writer)}: {name}: {unknown_name(str(key), list(known))}")
                elif key not in values or self.ranks[flat_path] < rank:
                    flat[key], self.writers[flat_path] = value, writer
                elif self.ranks[flat_path] == rank and values[key] != value:
                    text = disagreement(key, values[key], f"{name}.{key}", value)
                    self.faults.append(f"{_place(self.writers[flat_path])}: {text}")
        return flat

    def checked(self, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values in plain form; a value of the wrong type or out of bounds becomes a fault."""
        infos = settings_of(*self.sections[section])
        checked = {}
        for name, value in values.items():
            plain, wrong = check_value(infos[name], value) if _is_checked_here(infos[name]) else (value, None)
            if wrong is None:
                checked[name] = plain
            else:
                self.faults.append(f"{_place(self.writers[f'{section}.{name}'])}: {wrong}")
        return checked

    def _unknown_section(self, name: str) -> str:
        home = self._home(name)
        if home is not None:
            return f"{name} stands outside a section; move it under {home}:"
        listed = ", ".join(self.sections)
        return f"unknown section {name!r}{did_you_mean(name, self.sections)}; sections are {listed}"

    def _unknown_key(self, section: str, name: str) -> str:
        home = self._home(name)
        if home is not None:
            return f"{name} is a setting of {home}, not of {section}; move it under {home}:"
        text = unknown_name(name, list(settings_of(*self.sections[section])))
        if "did you mean" not in text:
            others = [
                f"{one}.{known}" for one, types in self.sections.items() for known in settings_of(*types)
            ]
            text += _mean_elsewhere(name, others)
        return f"{text} (section {section})"

    def _home(self, name: str) -> str | None:
        """The section that has a setting of this name."""
        present = present_name(name)
        return next((one for one, types in self.sections.items() if present in settings_of(*types)), None)


def _mean_elsewhere(name: str, known: Sequence[str]) -> str:
    """The end of a sentence that names the nearest of the settings "section.name"."""
    by_name = {one.partition(".")[2]: one for one in known}
    near = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.6)
    return f"; did you mean {by_name[near[0]]}?" if near else ""


def _inner_keys(written: Mapping[str, Any]) -> list[str]:
    """The paths ("outer.inner") of keys inside settings that are written as a mapping."""
    return [
        f"{key}.{inner}" for key, value in written.items() if isinstance(value, Mapping) for inner in value
    ]


def _place(origin: str) -> str:
    return origin.removeprefix("yaml ")


def _is_checked_here(info: SettingInfo) -> bool:
    """Settings whose value is an object are checked by what makes the object."""
    return info.kind in (bool, int, float, str, tuple, dict)
