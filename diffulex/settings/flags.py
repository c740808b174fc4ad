"""Command-line flags made from sections; an absent flag stays absent and overrides nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from diffulex.logger import get_logger
from diffulex.settings.aliases import NAME_ALIASES, renamed_value
from diffulex.settings.layers import Layer
from diffulex.settings.spec import SettingInfo, bounds_text, kind_noun, settings_of
from diffulex.settings.yaml_files import parse_scalar
from diffulex.utils.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["FlagParser", "add_flags", "flag_layer"]

logger = get_logger(__name__)

_SEPARATOR = "."


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviated flags that names the nearest known flag for a wrong one."""

    def __init__(self, *, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2 after one message."""
        start = "unrecognized arguments: "
        if message.startswith(start):
            flag = message.removeprefix(start).split()[0].partition("=")[0]
            message = f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}"
        self.exit(2, f"{self.prog}: error: {message}; --help lists all flags\n")


def add_flags(
    parser: argparse.ArgumentParser,
    section_types: Sequence[type],
    section: str,
    only: Collection[str] | None = None,
) -> None:
    """Adds one flag for every setting of the sections, or for those in `only`, in a group called `section`.

    ``--block-size 16`` sets a value, ``--enable-x`` and ``--no-enable-x`` set a boolean. Bounds and choices
    are checked later with those of the configuration files, so that all faults are reported at once.
    """
    group = parser.add_argument_group(f"{section} settings")
    infos = {name: info for name, info in settings_of(*section_types).items() if only is None or name in only}
    for info in infos.values():
        if info.setting.flag:
            _add_flag(group, info, section)
    for old, present in NAME_ALIASES.items():
        if present in infos:
            group.add_argument(
                _flag(old),
                dest=f"{section}{_SEPARATOR}{old}",
                default=argparse.SUPPRESS,
                type=_converter(infos[present]),
                help=argparse.SUPPRESS,
            )


def _add_flag(group: argparse._ArgumentGroup, info: SettingInfo, section: str) -> None:
    names = list(dict.fromkeys((_flag(info.file_name), _flag(info.name))))
    destination = f"{section}{_SEPARATOR}{info.name}"
    help_text = f"{info.setting.help} {_default_text(info)}".replace("%", "%%")
    if info.kind is bool:
        group.add_argument(
            *names,
            dest=destination,
            default=argparse.SUPPRESS,
            action=argparse.BooleanOptionalAction,
            help=help_text,
        )
    else:
        group.add_argument(
            *names,
            dest=destination,
            default=argparse.SUPPRESS,
            type=_converter(info),
            metavar=_metavar(info),
            help=help_text,
        )


def flag_layer(arguments: argparse.Namespace) -> Layer:
    """The settings written as flags; other attributes of the namespace are left alone."""
    values: dict[str, dict[str, object]] = {}
    origins: dict[str, dict[str, str]] = {}
    for destination, value in vars(arguments).items():
        section, separator, written = destination.partition(_SEPARATOR)
        if not separator:
            continue
        name = NAME_ALIASES.get(written, written)
        if name != written:
            logger.warning("%s is deprecated; write %s", _flag(written), _flag(name))
            if f"{section}{_SEPARATOR}{name}" in vars(arguments):
                continue
        present, line = renamed_value(name, value)
        if line is not None:
            logger.warning("%s", line)
        values.setdefault(section, {})[name] = present
        origins.setdefault(section, {})[name] = f"flag {_flag(written)}"
    return Layer(values, origins)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _converter(info: SettingInfo) -> Callable[[str], object]:
    """Text of the command line -> value; null and none mean nothing where nothing is allowed."""

    def convert(text: str) -> object:
        if info.optional and text.lower() in ("null", "none"):
            return None
        if info.kind is str:
            return text
        if info.kind is tuple:
            return _split(info, text)
        try:
            value = parse_scalar(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if info.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, info.kind) or isinstance(value, bool):
            raise argparse.ArgumentTypeError(f"{kind_noun(info.kind)} expected, got {text!r}")
        return value

    return convert


def _split(info: SettingInfo, text: str) -> tuple[object, ...]:
    parts = [part for part in text.split(",") if part]
    if info.item is not int:
        return tuple(parts)
    try:
        return tuple(int(part) for part in parts)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"whole numbers with commas expected, got {text!r}") from error


def _metavar(info: SettingInfo) -> str:
    if info.setting.choices:
        return "{" + ",".join(str(one) for one in info.setting.choices) + "}"
    if info.kind is tuple:
        return "N,N,..." if info.item is int else "TEXT,TEXT,..."
    return {int: "NUMBER", float: "NUMBER", dict: "MAPPING"}.get(info.kind, "TEXT")


def _default_text(info: SettingInfo) -> str:
    if info.setting.required:
        return "Required."
    bounds = bounds_text(info.setting)
    default = {None: "unset", "": "empty", (): "empty"}.get(info.default, info.default)  # type: ignore[call-overload]  # any default is hashable
    return f"Default {default}{'; ' + bounds if bounds else ''}."
