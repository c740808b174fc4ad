"""Is vLLM installed? The only module that names it; nothing of it is imported before a layer asks for it."""

from __future__ import annotations

import importlib.util

__all__ = ["has_vllm"]


def has_vllm() -> bool:
    """True when the package vllm could be imported; the answer does not import it."""
    return importlib.util.find_spec("vllm") is not None
