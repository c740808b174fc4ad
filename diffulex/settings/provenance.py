"""`Provenance`: where the values of a `Config` come from, carried along when one is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.settings.draft import CLASS_DEFAULT, KEYWORD

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ExplainRow", "Provenance"]


class ExplainRow(NamedTuple):
    """One line of the table that explains a configuration."""

    name: str
    value: object
    origin: str
    help: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which values the user wrote, and where every value comes from.

    `resolved` holds the final values of the configuration this one is derived from, empty for a first one:
    values that equal them are carried over and do not count as newly written. `measured` names those that the
    engine found out when it started. `ignored` are keywords that no setting has.
    """

    explicit: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    def written(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The names among `given` that the user wrote, each with its origin."""
        if not self.resolved:
            return {name: self.origins.get(name, KEYWORD) for name in given}
        changed = self.changed(given)
        kept = [name for name in given if name in self.explicit and name not in changed]
        return {
            **{name: self.origins.get(name, CLASS_DEFAULT) for name in kept},
            **dict.fromkeys(changed, KEYWORD),
        }

    def changed(self, given: Mapping[str, Any]) -> list[str]:
        """The names whose value differs from the configuration this one is derived from."""
        return [name for name, value in given.items() if self.resolved and value != self.resolved[name]]

    def kept_measurements(self, given: Mapping[str, Any]) -> list[str]:
        """The names whose value was found out by an engine and is carried over."""
        return [name for name in given if name in self.measured and name not in self.changed(given)]
