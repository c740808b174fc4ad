"""`Draft`: settings while they are being resolved, with the origin of every value and all broken rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffulex.settings.spec import Problem

__all__ = ["CLASS_DEFAULT", "KEYWORD", "Draft", "Hardware", "Values"]

# Values of all settings by name; Any because their types differ from name to name.
Values = Mapping[str, Any]

CLASS_DEFAULT = "default"
KEYWORD = "keyword argument"


class Hardware(NamedTuple):
    """What this machine has, as far as settings depend on it."""

    has_cuda: bool
    device_count: int
    has_vllm: bool


@dataclass(slots=True)
class Draft:
    """Values on their way to a `Config`.

    Made and used inside one `Config(...)` call. `explicit` are the names the user wrote, `origins` says of
    every name where its value comes from, `notes` are log records to send once nothing is wrong. `hardware`
    asks about the machine and is called only when an answer depends on it.
    """

    values: dict[str, Any]
    explicit: set[str]
    origins: dict[str, str]
    defaults: Values
    hardware: Callable[[], Hardware]
    problems: list[Problem] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)

    def refuse(self, name: str, text: str) -> None:
        """Record a broken rule about the setting `name`."""
        self.problems.append(Problem(name, text))

    def note(self, text: str, *, level: int = logging.WARNING) -> None:
        """Record a line for the log."""
        self.notes.append((level, text))

    def set(self, name: str, value: object, origin: str) -> None:
        """Give `name` a value that does not come from the user."""
        self.values[name] = value
        self.origins[name] = origin

    def is_broken(self, *names: str) -> bool:
        """True when one of the names has a value that was refused."""
        return any(problem.name in names for problem in self.problems)

    def is_demand(self, name: str) -> bool:
        """True when the user, the model or the strategy asks for the value, so it is no plain default."""
        return self.origins[name] != CLASS_DEFAULT

    def sentences(self) -> list[str]:
        """All broken rules, each with the file and line or the flag it comes from."""
        lines = []
        for name, text in self.problems:
            origin = self.origins.get(name, CLASS_DEFAULT)
            from_source = name in self.explicit and origin.startswith(("yaml ", "flag ", "task ", "--set"))
            lines.append(f"{text} [{origin}]" if from_source else text)
        return list(dict.fromkeys(lines))
