"""Where golden cases lie: beside the tests, or under ``DIFFULEX_GOLDEN_ROOT`` in the same layout."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"


def golden_root() -> Path:
    """The folder that holds one folder a model name."""
    return Path(os.environ.get("DIFFULEX_GOLDEN_ROOT") or DATA)


def fsm_cases() -> list[Path]:
    """All prediction tables."""
    return sorted((golden_root() / "engine_fsm").rglob("*.json"))
