"""From what the user wrote to the values that hold: checks, thresholds, strategy, defaults, forced values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from diffulex.settings.aliases import disagreement, renamed_value
from diffulex.settings.availability import apply_features, choose_device, refuse_unavailable_model
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS, registered_strategies
from diffulex.settings.draft import CLASS_DEFAULT
from diffulex.settings.effects import check_effects
from diffulex.settings.rules import RULES, Rule, check_rules
from diffulex.settings.spec import SettingInfo, check_value, unknown_name
from diffulex.settings.thresholds import DecodingThresholds
from diffulex.utils.registry import did_you_mean

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft

__all__ = ["THRESHOLD_NAMES", "apply_machine", "resolve_settings"]

THRESHOLD_NAMES = tuple(one.name for one in fields(DecodingThresholds))


# Words that origins begin with, lowest precedence first; keywords of a program are above all of them.
_LEVELS = (CLASS_DEFAULT, "task", "yaml", "--set", "flag")


def resolve_settings(draft: Draft, infos: Mapping[str, SettingInfo], rules: Sequence[Rule] = RULES) -> None:
    """Bring the draft to the values that hold, as far as neither checkpoint, version nor machine decides.

    `rules` are those across settings that are asked here; a caller that goes on to read a checkpoint leaves
    out those about sizes that it decides. Every broken rule is recorded; a value that was refused is replaced
    by its default for the rules after it.
    """
    _fold_thresholds(draft)
    _check_values(draft, infos)
    _choose_strategy(draft)
    _apply_model_defaults(draft)
    _apply_forced_values(draft)
    _check_family(draft)
    check_rules(draft, rules)


def apply_machine(draft: Draft) -> None:
    """Bring the draft to what this machine and this version can do, and refuse what is written in vain."""
    refuse_unavailable_model(draft)
    choose_device(draft)
    apply_features(draft)
    check_effects(draft)


def _fold_thresholds(draft: Draft) -> None:
    """Thresholds of `decoding_thresholds` become flat settings.

    A flat one of another value beside it is refused, unless one of the two has the higher precedence.
    """
    name = "decoding_thresholds"
    given = draft.values[name]
    if name in draft.explicit and isinstance(given, Mapping | DecodingThresholds):
        if isinstance(given, DecodingThresholds):
            # An object has all fields; those that differ from the default are taken for written.
            pairs = [(one, getattr(given, one)) for one in THRESHOLD_NAMES]
            written = {one: value for one, value in pairs if value != draft.defaults[one]}
        else:
            written = dict(given)
        for key, value in written.items():
            if key not in THRESHOLD_NAMES:
                draft.refuse(name, f"{name}: {unknown_name(str(key), THRESHOLD_NAMES)}")
            elif key not in draft.explicit or _level(draft, key) < _level(draft, name):
                draft.set(key, value, draft.origins[name])
                draft.explicit.add(key)
            elif draft.values[key] != value and _level(draft, key) == _level(draft, name):
                draft.refuse(key, disagreement(key, draft.values[key], f"{name}.{key}", value))
    elif name in draft.explicit and given is not None:
        draft.refuse(name, f"{name} must be a mapping or DecodingThresholds, got {given!r}")
    draft.values[name] = draft.defaults[name]


def _level(draft: Draft, name: str) -> int:
    word = draft.origins[name].partition(" ")[0]
    return _LEVELS.index(word) if word in _LEVELS else len(_LEVELS)


def _check_values(draft: Draft, infos: Mapping[str, SettingInfo]) -> None:
    """Types, choices and bounds of every value the user wrote, in plain form afterwards."""
    for name in [name for name in infos if name in draft.explicit]:
        value, deprecated = renamed_value(name, draft.values[name])
        if deprecated is not None:
            draft.note(deprecated)
        plain, wrong = check_value(infos[name], value)
        if wrong is not None:
            draft.refuse(name, wrong)
            plain = draft.defaults[name]
        draft.values[name] = plain


def _choose_strategy(draft: Draft) -> None:
    """The strategy that was written, or the family's own."""
    name, strategy = draft.values["model_name"], draft.values["decoding_strategy"]
    if "decoding_strategy" not in draft.explicit:
        own = MODEL_DEFAULTS[name].default_strategy
        if own != strategy:
            draft.set("decoding_strategy", own, f"model default ({name})")
    elif strategy not in STRATEGY_DEFAULTS and not draft.is_broken("decoding_strategy"):
        known = registered_strategies()
        if strategy not in known:
            listed = sorted({*known, *STRATEGY_DEFAULTS})
            draft.refuse(
                "decoding_strategy",
                f"decoding_strategy must be one of {', '.join(listed)}, got {strategy!r}"
                f"{did_you_mean(strategy, listed)}",
            )
            draft.values["decoding_strategy"] = MODEL_DEFAULTS[name].default_strategy


def _apply_model_defaults(draft: Draft) -> None:
    name = draft.values["model_name"]
    for key, value in MODEL_DEFAULTS[name].settings.items():
        if key not in draft.explicit:
            draft.set(key, value, f"model default ({name})")


def _apply_forced_values(draft: Draft) -> None:
    strategy = draft.values["decoding_strategy"]
    row = STRATEGY_DEFAULTS.get(strategy)
    if row is None or draft.is_broken("decoding_strategy"):
        return
    for name, value in row.forces.items():
        written = draft.values[name]
        if written == value:
            continue
        if name in draft.explicit:
            draft.note(f"{name}={written!r} is overridden: decoding_strategy={strategy!r} forces {value!r}")
        draft.set(name, value, f"forced by strategy {strategy}")


def _check_family(draft: Draft) -> None:
    """The strategy and the sampling mode must be ones the family and the strategy can run."""
    if draft.is_broken("model_name", "decoding_strategy"):
        return
    name, strategy = draft.values["model_name"], draft.values["decoding_strategy"]
    family, row = MODEL_DEFAULTS[name], STRATEGY_DEFAULTS.get(strategy)
    if row is not None and strategy not in family.strategies:
        draft.refuse(
            "decoding_strategy",
            f"decoding_strategy={strategy!r} does not run with model_name={name!r}; "
            f"use {' or '.join(family.strategies)}",
        )
    mode = draft.values["sampling_mode"]
    if draft.is_broken("sampling_mode", "decoding_strategy"):
        return
    if mode not in family.sampling_modes:
        draft.refuse(
            "sampling_mode",
            f"sampling_mode={mode!r} does not run with model_name={name!r}; "
            f"use {' or '.join(family.sampling_modes)}",
        )
    elif row is not None and mode not in row.sampling_modes:
        draft.refuse(
            "sampling_mode",
            f"sampling_mode={mode!r} does not run with decoding_strategy={strategy!r}; "
            f"use {' or '.join(row.sampling_modes)}",
        )
