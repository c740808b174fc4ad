"""A folder for engines with fake models; what tests change about those models is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import write_stub
from tests.support.engines import Twist
from tests.support.tables import EOS_IDS, MASK_ID, VOCAB

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stub")
    return str(write_stub(folder, VOCAB, mask_id=MASK_ID, eos_ids=EOS_IDS))


@pytest.fixture(autouse=True)
def restore_twist() -> Iterator[None]:
    yield
    Twist.shift, Twist.always_force, Twist.sharpness, Twist.table = False, False, 1.0, None
