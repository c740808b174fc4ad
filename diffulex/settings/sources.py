"""Settings from YAML files and from overrides of the command line: `load_yaml` reads them as one layer.

Sections are named groups of settings, "engine" and "eval" in the bench. Every fault of every file is reported
together, with file and line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffulex.logger import get_logger
from diffulex.settings.aliases import present_name, rename, renamed_value
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
    paths: Sequence[str | Path], overrides: Sequence[str], sections: Sections
) -> tuple[Layer, list[str]]:
    """What `load_yaml` reads, without the settings that are faulty, and all faults.

    For a caller that goes on to check the other settings, so that a user sees every fault at once.
    """
    reader = _Reader(sections)
    contents = reader.files([read_yaml(Path(path)) for path in paths])
    contents += [reader.override(text) for text in overrides]
    merged = reader.merged(contents)
    values = {section: reader.checked(section, written) for section, written in merged.items()}
    origins = {
        section: {name: reader.writers[f"{section}.{name}"] for name in written}
        for section, written in values.items()
    }
    return Layer(values, origins), reader.faults


class _Reader:
    """Collects, while sources are read in order, all faults and the last writer of every setting."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.faults: list[str] = []
        self.writers: dict[str, str] = {}

    def files(self, files: Sequence[YamlFile]) -> list[dict[str, Any]]:
        """The known settings of each file, under their present names."""
        self.faults += [fault for file in files for fault in file.faults]
        return [self._file(file) for file in files]

    def _file(self, file: YamlFile) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for section, content in file.content.items():
            if section not in self.sections:
                self.faults.append(f"{file.where(str(section))}: {self._unknown_section(str(section))}")
            elif content is not None and not isinstance(content, Mapping):
                self.faults.append(
                    f"{file.where(section)}: {section} must hold settings, it holds {content!r}"
                )
            else:
                written = {str(key): value for key, value in (content or {}).items()}
                origins = {key: f"yaml {file.where(f'{section}.{key}')}" for key in written}
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
        outer, *inner = name.split(".")
        for part in reversed(inner):
            value = {part: value}
        return {section: self._settings(section, {outer: value}, {outer: origin})}

    def _settings(
        self, section: str, written: Mapping[str, Any], origins: Mapping[str, str]
    ) -> dict[str, Any]:
        """The known settings among `written`, under their present names; the others become faults."""
        infos = settings_of(*self.sections[section])
        values, deprecated, problems = rename(written)
        by_name: dict[str, str] = {}
        for key, origin in origins.items():
            by_name.setdefault(present_name(key), origin)
        self.writers |= {f"{section}.{name}": origin for name, origin in by_name.items()}
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
        return f"{unknown_name(name, list(settings_of(*self.sections[section])))} (section {section})"

    def _home(self, name: str) -> str | None:
        """The section that has a setting of this name."""
        present = present_name(name)
        return next((one for one, types in self.sections.items() if present in settings_of(*types)), None)


def _place(origin: str) -> str:
    return origin.removeprefix("yaml ")


def _is_checked_here(info: SettingInfo) -> bool:
    """Settings whose value is an object are checked by what makes the object."""
    return info.kind in (bool, int, float, str, tuple, dict)
