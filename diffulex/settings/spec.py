"""One setting: default, choices, bounds and help in one place, and the check of a value against them.

A section is a frozen keyword-only dataclass whose fields are made with `setting`. Python keywords, YAML,
command-line flags and the reference tables are all read from the sections.
"""

from __future__ import annotations

import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from diffulex.utils.registry import did_you_mean

__all__ = [
    "ConfigError",
    "Problem",
    "Setting",
    "SettingInfo",
    "bounds_text",
    "check_value",
    "kind_noun",
    "setting",
    "settings_of",
    "unknown_name",
]


class Problem(NamedTuple):
    """One broken rule: the setting it concerns and a sentence with rule, value and next step."""

    name: str
    text: str


class ConfigError(ValueError):
    """Settings that cannot work; `problems` and the message hold every broken rule as a sentence."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            listed = "".join(f"\n  - {problem}" for problem in self.problems)
            message = f"{len(self.problems)} settings cannot be used:{listed}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting beside its name, type and default.

    `low` and `high` are inclusive bounds, `above` an exclusive lower one; they and `choices` also hold for
    each item of a list. `file_name` is the name in YAML files and flags where it differs from Python's.
    `required` means that the default is no usable value.
    """

    help: str
    choices: tuple[object, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    file_name: str | None = None
    required: bool = False
    flag: bool = True


# The result is typed Any because a dataclass field is declared with the type of its value.
def setting(default: Any, *, help: str, kw_only: bool = True, **facts: Any) -> Any:
    """A dataclass field that carries its `Setting`."""
    metadata = {"setting": Setting(help=help, **facts)}
    return field(default=default, metadata=metadata, kw_only=kw_only)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """A setting as found in its section: what tables, flags and checks need to know.

    `kind` is the plain type of a value (bool, int, float, str, tuple, dict or a dataclass), `item` the type
    of the items of a tuple, and `optional` says whether None is a value.
    """

    name: str
    section: type
    kind: type
    item: type | None
    optional: bool
    default: object
    setting: Setting

    @property
    def file_name(self) -> str:
        """The name in YAML files, and with dashes as a flag."""
        return self.setting.file_name or self.name


def settings_of(*sections: type) -> Mapping[str, SettingInfo]:
    """All settings of the sections by name, in order of definition."""
    return _settings_of(sections)


@cache
def _settings_of(sections: tuple[type, ...]) -> Mapping[str, SettingInfo]:
    found: dict[str, SettingInfo] = {}
    for section in sections:
        hints = typing.get_type_hints(section)
        for one in fields(section):
            if "setting" not in one.metadata:
                continue
            kind, item, optional = _parse_hint(hints[one.name])
            default = None if one.default is MISSING else one.default
            info = SettingInfo(one.name, section, kind, item, optional, default, one.metadata["setting"])
            if one.name in found and found[one.name].setting is not info.setting:
                raise ValueError(f"setting {one.name} stands in two sections; keep one of them")
            found.setdefault(one.name, info)
    return types.MappingProxyType(found)


def _parse_hint(hint: Any) -> tuple[type, type | None, bool]:
    """A type hint as (kind of a value, kind of an item, is None allowed)."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    optional = type(None) in options
    plain = next(one for one in options if one is not type(None))
    origin = typing.get_origin(plain) or plain
    if origin is tuple:
        return tuple, typing.get_args(plain)[0], optional
    if origin is Mapping or origin is dict:
        return dict, None, optional
    return origin, None, optional


def unknown_name(name: str, known: Sequence[str]) -> str:
    """The sentence for a name that no setting has."""
    return f"unknown setting {name!r}{did_you_mean(name, known)}"


def check_value(info: SettingInfo, value: object) -> tuple[object, str | None]:
    """The value in its plain form, and the sentence that says what is wrong with it, if anything is."""
    plain, wrong = _convert(info, value)
    if wrong is None and plain is not None:
        items = plain if isinstance(plain, tuple) else (plain,)
        wrong = next((text for one in items if (text := _outside(info, one))), None)
    return plain, wrong


def _convert(info: SettingInfo, value: object) -> tuple[object, str | None]:
    if value is None:
        return None, None if info.optional else f"{info.name} must be {kind_noun(info.kind)}, got None"
    if info.kind is tuple:
        return _convert_items(info, value)
    if info.kind in _CONVERTERS:
        plain = _CONVERTERS[info.kind](value)
    else:
        plain = value if isinstance(value, info.kind) else None
    if plain is None:
        return value, f"{info.name} must be {kind_noun(info.kind)}, got {value!r}"
    return plain, None


def _convert_items(info: SettingInfo, value: object) -> tuple[object, str | None]:
    item = info.item or str
    raw = (value,) if isinstance(value, str | int) else value
    if not isinstance(raw, Sequence):
        return value, f"{info.name} must be a list of {kind_noun(item, many=True)}, got {value!r}"
    plain = tuple(_CONVERTERS[item](one) for one in raw)
    if any(one is None for one in plain):
        return value, f"{info.name} must be a list of {kind_noun(item, many=True)}, got {value!r}"
    return plain, None


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _as_str(value: object) -> str | None:
    return os.fspath(value) if isinstance(value, os.PathLike) else value if isinstance(value, str) else None


_CONVERTERS: dict[type, Callable[[object], object]] = {
    bool: lambda value: value if isinstance(value, bool) else None,
    int: _as_int,
    float: _as_float,
    str: _as_str,
    dict: lambda value: dict(value) if isinstance(value, Mapping) else None,
}
_NOUNS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true/false values"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a text", "texts"),
    dict: ("a mapping of names to values", "mappings"),
}


def kind_noun(kind: type, *, many: bool = False) -> str:
    """What a value of this type is called in a sentence."""
    return _NOUNS.get(kind, (f"a {kind.__name__}", f"{kind.__name__} values"))[many]


def _outside(info: SettingInfo, value: object) -> str | None:
    """The sentence for a value that is no choice or out of bounds."""
    facts = info.setting
    if facts.choices and value not in facts.choices:
        near = did_you_mean(str(value), [one for one in facts.choices if isinstance(one, str)])
        return f"{info.name} must be one of {', '.join(map(str, facts.choices))}, got {value!r}{near}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    below = (facts.low is not None and value < facts.low) or (
        facts.above is not None and value <= facts.above
    )
    if below or (facts.high is not None and value > facts.high):
        return f"{info.name} must be {bounds_text(facts)}, got {value!r}"
    return None


def bounds_text(facts: Setting) -> str:
    """The bounds in words: "at least 1", "above 0 and at most 1"."""
    parts = []
    if facts.above is not None:
        parts.append(f"above {_number(facts.above)}")
    if facts.low is not None:
        parts.append(f"at least {_number(facts.low)}")
    if facts.high is not None:
        parts.append(f"at most {_number(facts.high)}")
    return " and ".join(parts)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
