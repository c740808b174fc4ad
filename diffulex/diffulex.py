"""`Diffulex`, the public name of the engine."""

from __future__ import annotations

from diffulex.engine.engine import DiffulexEngine

__all__ = ["Diffulex"]

Diffulex = DiffulexEngine
