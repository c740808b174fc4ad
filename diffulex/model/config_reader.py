"""Reads typed values out of a checkpoint's config.json and reports everything wrong with it at once."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self, TypeVar

from diffulex.utils.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from diffulex.utils.checkpoint import CheckpointFacts

T = TypeVar("T")


class ConfigReader:
    """Made by a family for one checkpoint. A key that is absent or null takes the default.

    Wrong values are noted and replaced; `finish` raises when any were noted.
    """

    def __init__(self, facts: CheckpointFacts) -> None:
        self._config = facts.config
        self._path = facts.path / "config.json"
        self._problems: list[str] = []
        self._prefix = ""

    def section(self, key: str) -> Self:
        """A reader of the table under `key` that notes its problems here, with the whole path of a key."""
        inner = copy.copy(self)
        inner._prefix = f"{self._prefix}{key}."
        value = self._config.get(key)
        inner._config = value if isinstance(value, dict) else self._note(key, "a table", value, {})
        return inner

    def stated_keys(self) -> tuple[str, ...]:
        """The keys that are there and not null."""
        return tuple(key for key, value in self._config.items() if value is not None)

    def word(self, key: str, choices: Sequence[str], default: str) -> str:
        """One word out of `choices`."""
        value = self._value(key, default)
        if isinstance(value, str) and value in choices:
            return value
        return self._note(key, " or ".join(choices), value, default)

    def words(self, key: str, choices: Collection[str], default: Sequence[str]) -> tuple[str, ...]:
        """A list of words out of `choices`."""
        value = self._value(key, default)
        if isinstance(value, list | tuple) and all(word in choices for word in value):
            return tuple(value)
        return self._note(key, f"a list of {' and '.join(sorted(choices))}", value, tuple(default))

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        return self._note(key, "a positive whole number", value, 1)

    def count_or_none(self, key: str, default: int) -> int:
        """A whole number, 0 included."""
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        return self._note(key, "a whole number of at least 0", value, default)

    def indices(self, key: str) -> frozenset[int]:
        """A list of whole numbers from 0 on; empty when it is absent."""
        value = self._value(key, [])
        if isinstance(value, list) and all(type(one) is int and one >= 0 for one in value):
            return frozenset(value)
        return self._note(key, "a list of whole numbers of at least 0", value, frozenset())

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        return self._note(key, "a positive number", value, 1.0)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._value(key, default)
        return value if isinstance(value, bool) else self._note(key, "true or false", value, default)

    def rope_theta(self, default: float | None = None) -> float:
        """The rotary base, in either spelling; scaled rotary embeddings are refused.

        Files hold `rope_theta` and `rope_scaling`, or both inside `rope_parameters`.
        """
        parameters = self._config.get("rope_parameters")
        parameters = parameters if isinstance(parameters, dict) else {}
        scaling = self._config.get("rope_scaling") or parameters
        kind = (
            scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
        )
        if kind != "default":
            self._note("rope_scaling", "absent, other rotary embeddings are not supported", kind, None)
        stated = parameters.get("rope_theta", self._config.get("rope_theta"))
        if isinstance(stated, int | float) and not isinstance(stated, bool) and stated > 0:
            return float(stated)
        if stated is None and default is not None:
            return default
        return self._note("rope_theta", "a positive number", stated, 1.0)

    def expect(self, key: str, *supported: object) -> None:
        """The key is absent, null, or one of the values that the network implements."""
        value = self._config.get(key)
        if value is not None and value not in supported:
            self._note(key, " or ".join(repr(one) for one in supported), value, None)

    def check(self, holds: bool, problem: str) -> None:
        """Note `problem` unless `holds`."""
        if not holds:
            self._problems.append(problem)

    def finish(self) -> None:
        """Raise a `CheckpointError` that lists every problem noted."""
        if self._problems:
            raise CheckpointError(f"{self._path} cannot be used: {'; '.join(dict.fromkeys(self._problems))}")

    def _value(self, key: str, default: object) -> object:
        value = self._config.get(key)
        return default if value is None else value

    def _note(self, key: str, rule: str, value: object, instead: T) -> T:
        stated = "it is absent" if value is None else f"it is {value!r}"
        self._problems.append(f"{self._prefix}{key} must be {rule}, {stated}")
        return instead
