"""A checkpoint folder for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.configs import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SDAR folder; its weights are no network."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
