"""Diffulex: an inference engine for diffusion language models.

The public names load on first use, so that importing the package loads neither torch nor a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.diffulex import Diffulex
    from diffulex.logger import LoggerMixin, get_logger, setup_logger
    from diffulex.sampling_params import SamplingParams

__all__ = ["Diffulex", "LoggerMixin", "SamplingParams", "get_logger", "setup_logger"]

_HOMES = {
    "Diffulex": "diffulex.diffulex",
    "LoggerMixin": "diffulex.logger",
    "SamplingParams": "diffulex.sampling_params",
    "get_logger": "diffulex.logger",
    "setup_logger": "diffulex.logger",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'diffulex' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
