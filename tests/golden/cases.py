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


def model_folders() -> list[Path]:
    """Every checkpoint folder of every model name, supported or not."""
    return sorted(path.parent for path in golden_root().glob("*/*/config.json"))


def decode_cases() -> list[Path]:
    """Every decode trace of every checkpoint."""
    return sorted(path for folder in model_folders() for path in folder.glob("decode_*.json"))


def case_id(path: Path) -> str:
    """Model name, case and file in one word."""
    return "-".join((path.parent.parent.name, path.parent.name, path.stem))
