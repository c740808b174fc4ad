"""`Registry[T]`: classes under names, with lazy "module:Class" targets and lookup errors that help."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Registry", "did_you_mean", "load_target"]

T = TypeVar("T")
Sub = TypeVar("Sub")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the known name nearest to `name`; empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def load_target(target: str) -> object:
    """The object behind "module:name", imported now."""
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"a lazy target reads 'module:Name', got {target!r}")
    module = importlib.import_module(module_name)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module_name} has no {attribute!r}; correct the target {target!r}")
        found = getattr(found, part)
    return found


class Registry(Generic[T]):
    """Classes of one kind under their names.

    Args:
        kind: What the classes are, for messages ("scheduler").
        base: Class that every registered class must derive from.
    """

    # `base` is type[Any] and not type[T] because type[T] would refuse abstract classes.
    def __init__(self, kind: str, base: type[Any]) -> None:
        self.kind = kind
        self.base = base
        self._entries: dict[str, type[T] | str] = {}

    def register(self, name: str) -> Callable[[type[Sub]], type[Sub]]:
        """A decorator that files a class under `name` and returns it unchanged.

        Raises:
            ValueError: the name is taken by another class.
            TypeError: the class does not derive from the base of this registry.
        """

        def file_under_name(cls: type[Sub]) -> type[Sub]:
            self._add(name, self._checked(name, cls))
            return cls

        return file_under_name

    def register_lazy(self, name: str, target: str) -> None:
        """File "module:Class" under `name`; it is imported and checked at the first `get`."""
        if ":" not in target:
            raise ValueError(f"a lazy {self.kind} reads 'module:Class', got {target!r} for {name!r}")
        self._add(name, target)

    def get(self, name: str) -> type[T]:
        """The class filed under `name`.

        Raises:
            ValueError: nothing has that name; the message gives the nearest and all known names.
            TypeError: a lazy target is not a class of the right base.
        """
        if name not in self._entries:
            listed = ", ".join(self.names()) or "none"
            hint = did_you_mean(name, self._entries) or ";"
            raise ValueError(f"no {self.kind} {name!r}{hint} known: {listed}")
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._checked(name, load_target(entry))
            self._entries[name] = entry
        return entry

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _add(self, name: str, entry: type[T] | str) -> None:
        if not name:
            raise ValueError(f"a {self.kind} needs a name, got {name!r}")
        if name in self._entries:
            raise ValueError(
                f"{self.kind} {name!r} is {_describe(self._entries[name])} already, "
                f"so {_describe(entry)} needs another name"
            )
        self._entries[name] = entry

    def _checked(self, name: str, candidate: object) -> type[T]:
        if not isinstance(candidate, type) or not issubclass(candidate, self.base):
            raise TypeError(
                f"{self.kind} {name!r} must derive from {_describe(self.base)}, got {_describe(candidate)}"
            )
        return candidate


def _describe(entry: object) -> str:
    if isinstance(entry, type):
        return f"{entry.__module__}.{entry.__qualname__}"
    return entry if isinstance(entry, str) else repr(entry)
