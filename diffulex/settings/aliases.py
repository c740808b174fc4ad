"""Old names of settings and values that still work, each use announced by one deprecation line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from diffulex.settings.spec import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NAME_ALIASES",
    "PLAIN_NAMES",
    "VALUE_ALIASES",
    "disagreement",
    "present_name",
    "rename",
    "renamed_value",
]

# The second name the settings page gives; no deprecation.
PLAIN_NAMES: Final[Mapping[str, str]] = {"model_path": "model"}
NAME_ALIASES: Final[Mapping[str, str]] = {
    "diffusion_block_size": "block_size",
    "mask_token": "mask_token_id",
    "max_num_seqs": "max_num_reqs",
}
VALUE_ALIASES: Final[Mapping[str, Mapping[str, str]]] = {
    "decoding_strategy": {
        "block_diffusion": "multi_bd",
        "fast_dllm": "multi_bd",
        "multi_block_diffusion": "multi_bd",
    },
}


def present_name(name: str) -> str:
    """The name in use today for a setting that may be written under another one."""
    return PLAIN_NAMES.get(name) or NAME_ALIASES.get(name, name)


def rename(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """The settings under their present names, one line for each deprecated name, and contradictions."""
    values: dict[str, Any] = {}
    deprecated: list[str] = []
    problems: list[Problem] = []
    for name, value in given.items():
        present = present_name(name)
        if name in NAME_ALIASES:
            deprecated.append(f"{name} is deprecated; write {present}")
        if present != name and given.get(present, value) != value:
            problems.append(Problem(present, disagreement(present, given[present], name, value)))
        else:
            values[present] = value
    return values, deprecated, problems


def disagreement(name: str, value: object, second_name: str, second_value: object) -> str:
    """The sentence for one setting that is written under two names with two values; `name` should stay."""
    return f"{name} ({value!r}) and {second_name} ({second_value!r}) disagree; keep {name}"


def renamed_value(name: str, value: Any) -> tuple[Any, str | None]:
    """The value under its present name and the deprecation line, or the value as it is and None."""
    aliases = VALUE_ALIASES.get(name, {})
    if not isinstance(value, str) or value not in aliases:
        return value, None
    return aliases[value], f"{name}={value!r} is deprecated; write {aliases[value]!r}"
