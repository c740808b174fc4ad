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
from diffulex.settings.aliases import NAME_ALIASES, PLAIN_NAMES, rename, renamed_value
from diffulex.settings.layers import Layer
from diffulex.settings.spec import ConfigError, SettingInfo, check_value, settings_of, unknown_name
from diffulex.settings.yaml_files import YamlFile, parse_scalar, read_yaml
from diffulex.utils.registry import did_you_mean

__all__ = ["Sections", "load_yaml"]

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
    files = [read_yaml(Path(path)) for path in paths]
    faults = [fault for file in files for fault in file.faults]
    writers: dict[str, str] = {}
    contents = [_known_part(file, sections, faults, writers) for file in files]
    contents += [_override(text, sections, faults, writers) for text in overrides]
    merged = _resolve(contents, faults)
    values = {
        section: _checked(section, merged.get(section, {}), sections, writers, faults) for section in merged
    }
    if faults:
        raise ConfigError(faults)
    origins = {
        section: {name: writers[f"{section}.{name}"] for name in written}
        for section, written in values.items()
    }
    return Layer(values, origins)


def _known_part(
    file: YamlFile, sections: Sections, faults: list[str], writers: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """The file's known settings under their present names; unknown ones become faults."""
    known: dict[str, dict[str, Any]] = {}
    for section, content in file.content.items():
        if section not in sections:
            faults.append(f"{file.where(str(section))}: {_unknown_section(str(section), sections)}")
        elif content is None:
            known[section] = {}
        elif not isinstance(content, Mapping):
            faults.append(f"{file.where(section)}: {section} must hold settings, it holds {content!r}")
        else:
            known[section] = _known_settings(
                section,
                content,
                sections,
                faults,
                {str(key): file.where(f"{section}.{key}") for key in content},
            )
            for key in content:
                writers[f"{section}.{_present(str(key))}"] = f"yaml {file.where(f'{section}.{key}')}"
    return known


def _override(text: str, sections: Sections, faults: list[str], writers: dict[str, str]) -> dict[str, Any]:
    key, separator, raw = text.partition("=")
    section, dot, name = key.strip().partition(".")
    place = f"--set {text}"
    if not separator or not dot or not name:
        faults.append(f"{place}: write SECTION.NAME=VALUE, as in engine.block_size=16")
        return {}
    if section not in sections:
        faults.append(f"{place}: {_unknown_section(section, sections)}")
        return {}
    try:
        value = parse_scalar(raw)
    except ValueError as error:
        faults.append(f"{place}: {error}")
        return {}
    outer, *inner = name.split(".")
    for part in reversed(inner):
        value = {part: value}
    writers[f"{section}.{_present(outer)}"] = place
    return {section: _known_settings(section, {outer: value}, sections, faults, {outer: place})}


def _known_settings(
    section: str,
    content: Mapping[str, Any],
    sections: Sections,
    faults: list[str],
    places: Mapping[str, str],
) -> dict[str, Any]:
    infos = settings_of(*sections[section])
    values, deprecated, problems = rename({str(key): value for key, value in content.items()})
    for line in deprecated:
        logger.warning("%s", line)
    for problem in problems:
        place = next(place for key, place in places.items() if _present(key) == problem.name)
        faults.append(f"{place}: {problem.text}")
    known = {}
    for name, value in values.items():
        if name in infos:
            known[name], old_value = renamed_value(name, value)
            if old_value is not None:
                logger.warning("%s", old_value)
        else:
            faults.append(f"{places[name]}: {_unknown_key(section, name, sections)}")
    return known


def _resolve(contents: Sequence[Mapping[str, Any]], faults: list[str]) -> dict[str, dict[str, Any]]:
    """All contents merged, with references to other values replaced by them."""
    if not contents:
        return {}
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(dict(content)) for content in contents))
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        faults.append(f"{key}{(error.msg or str(error)).splitlines()[0]}")
        return {}
    assert isinstance(plain, dict)
    return {str(section): dict(values) for section, values in plain.items()}


def _checked(
    section: str,
    values: Mapping[str, Any],
    sections: Sections,
    writers: Mapping[str, str],
    faults: list[str],
) -> dict[str, Any]:
    """The values in plain form; a value of the wrong type or out of bounds becomes a fault with its place."""
    infos = settings_of(*sections[section])
    checked = {}
    for name, value in values.items():
        checked[name] = value
        if _is_checked_here(infos[name]):
            checked[name], wrong = check_value(infos[name], value)
            if wrong is not None:
                faults.append(f"{writers[f'{section}.{name}'].removeprefix('yaml ')}: {wrong}")
    return checked


def _is_checked_here(info: SettingInfo) -> bool:
    """Settings whose value is an object are checked by what makes the object."""
    return info.kind in (bool, int, float, str, tuple, dict)


def _present(name: str) -> str:
    return PLAIN_NAMES.get(name) or NAME_ALIASES.get(name, name)


def _unknown_section(name: str, sections: Sections) -> str:
    home = next((one for one in sections if name in _names(sections[one])), None)
    if home is not None:
        return f"{name} stands outside a section; move it under {home}:"
    return f"unknown section {name!r}{did_you_mean(name, sections)}; sections are {', '.join(sections)}"


def _unknown_key(section: str, name: str, sections: Sections) -> str:
    home = next((one for one in sections if name in _names(sections[one])), None)
    if home is not None:
        return f"{name} is a setting of {home}, not of {section}; move it under {home}:"
    return f"{unknown_name(name, list(_names(sections[section])))} (section {section})"


def _names(section_types: Sequence[type]) -> set[str]:
    return set(settings_of(*section_types)) | set(PLAIN_NAMES) & {
        info.file_name for info in settings_of(*section_types).values()
    }
