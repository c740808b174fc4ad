"""Tables of the settings guide that are no sections: families, strategies, availability, effects."""

from __future__ import annotations

from diffulex.settings.availability import AVAILABLE_MODELS, AVAILABLE_STRATEGIES, FEATURES
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS
from diffulex.settings.effects import EFFECTS
from diffulex.settings.tables import markdown_table

__all__ = ["effect_table", "feature_table", "model_table", "strategy_table"]


def model_table() -> str:
    """Each model family with its strategies, the default one first."""
    rows = []
    for name, family in MODEL_DEFAULTS.items():
        others = [one for one in family.strategies if one != family.default_strategy]
        ready = [one for one in family.strategies if one in AVAILABLE_STRATEGIES]
        runs = _code(*ready) if name in AVAILABLE_MODELS else ""
        rows.append(
            (
                _code(name),
                _code(family.default_strategy, *others),
                _code(*family.sampling_modes),
                runs or "not yet",
            )
        )
    return markdown_table(
        ("Model", "Strategies, default first", "Sampling modes", "Run in this version"), rows
    )


def strategy_table() -> str:
    """Each strategy with the settings it forces."""
    rows = []
    for name, row in STRATEGY_DEFAULTS.items():
        forced = ", ".join(_code(f"{key}={value}") for key, value in row.forces.items())
        rows.append((_code(name), forced, "yes" if name in AVAILABLE_STRATEGIES else "not yet"))
    return markdown_table(("Strategy", "Forces", "Runs in this version"), rows)


def feature_table() -> str:
    """Settings of which only some values work everywhere in this version."""
    needs = {"cuda": "a CUDA device", "devices": "as many CUDA devices", "vllm": "the package vllm", None: ""}
    rows = [
        (
            _code(feature.name),
            _code(*map(str, feature.plain)),
            needs[feature.need],
            "yes" if feature.ready else "not yet",
        )
        for feature in FEATURES
    ]
    return markdown_table(("Key", "Works everywhere", "Other values need", "Run in this version"), rows)


def effect_table() -> str:
    """Settings that are read only together with others."""
    rows = [
        (_code(*effect.names), effect.needs, "refused" if effect.refuse else "noted in the log")
        for effect in EFFECTS
    ]
    return markdown_table(("Keys", "Have an effect only with", "Written otherwise"), rows)


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)
