"""`Layer`: settings as one source wrote them, and how layers are put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Layer", "layer_of", "merge"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Written settings by section and name, and the origin of each."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def merge(*layers: Layer) -> Layer:
    """The settings of all layers; a later layer wins over an earlier one.

    The order of precedence is the caller's: task YAML first, then configuration files, then flags. Defaults
    stay out of the layers, since what was written counts even where it equals a default.
    """
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, dict[str, str]] = {}
    for layer in layers:
        for section, written in layer.values.items():
            values.setdefault(section, {}).update(written)
            origins.setdefault(section, {}).update(layer.origins.get(section, {}))
    return Layer(values, origins)


def layer_of(section: str, values: Mapping[str, Any], origin: str) -> Layer:
    """A layer of one section whose values all come from one place."""
    return Layer({section: dict(values)}, {section: dict.fromkeys(values, origin)})
