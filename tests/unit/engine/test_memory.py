"""The division of memory among logits and KV pages, with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.attention.cache_layout import KVShape
from diffulex.config import ConfigError
from diffulex.engine.memory import LOGITS_COPIES, MAX_LOGITS_ROWS, CacheShape, MemoryPlan, plan_memory
from tests.support.configs import make_checkpoint, make_config

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = CacheShape((KVShape(num_kv_heads=3, head_dim=8),) * 2, itemsize=4)
PAGE_BYTES = 2 * 2 * 3 * 8 * 4 * 16
MIB = 2**20


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("memory"))


def plan(folder: Path, *, available: int, vocab_size: int = 1000, **settings: Any) -> MemoryPlan:
    plain = {
        "block_size": 8, "page_size": 16, "buffer_size": 2, "max_num_reqs": 4, "max_model_len": 100,
        "gpu_memory_utilization": 0.5,
    }  # fmt: skip
    config = make_config(folder, **{**plain, **settings})
    return plan_memory(config, SHAPE, vocab_size, available)


def test_a_position_costs_keys_and_values_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 3 * 8 * 4
    assert CacheShape((KVShape(8, 256), KVShape(8, 256), KVShape(2, 512)), 2).bytes_per_token == 20480


def test_a_model_that_keeps_nothing_gets_the_pages_that_were_written(folder: Path) -> None:
    config = make_config(folder, num_pages=999, page_size=16, block_size=8, max_num_reqs=1, max_model_len=16)
    assert plan_memory(config, CacheShape((), 4), 10, 2**20).num_pages == 999


def test_with_plenty_of_memory_every_request_may_have_full_length(folder: Path) -> None:
    made = plan(folder, available=2**30)
    # 100 positions are seven pages of 16; 4 requests x 2 blocks x 8 positions are sampled at most.
    assert (made.num_pages, made.max_logits_rows) == (4 * 7, 64)
    assert made.cache_bytes == 28 * PAGE_BYTES
    assert made.logits_bytes == 64 * 1000 * 4 * LOGITS_COPIES


def test_with_little_memory_the_pool_takes_what_is_left_beside_the_logits(folder: Path) -> None:
    available = 2 * (1000 * 16 * 8 + 12 * PAGE_BYTES + 5)
    made = plan(folder, available=available)
    # A fifth of the budget would not hold one block of logits; one block is the least.
    assert made.max_logits_rows == 8
    assert made.num_pages == 12
    assert made.cache_bytes + made.logits_bytes <= available // 2


def test_logits_take_a_fifth_of_the_budget_at_most(folder: Path) -> None:
    row = 1000 * 4 * LOGITS_COPIES
    made = plan(folder, available=2 * 5 * 20 * row)
    assert made.max_logits_rows == 20


def test_the_rows_at_a_time_have_an_upper_bound(folder: Path) -> None:
    made = plan(folder, available=2**40, max_num_reqs=512, buffer_size=4, vocab_size=10, num_pages=50)
    assert made.max_logits_rows == MAX_LOGITS_ROWS


def test_a_written_number_of_pages_is_kept_or_refused(folder: Path) -> None:
    assert plan(folder, available=2**30, num_pages=5).num_pages == 5
    room = 2 * (1000 * 16 * 8 + 5 * PAGE_BYTES)
    assert plan(folder, available=room, num_pages=5).num_pages == 5
    with pytest.raises(ConfigError, match=r"6 KV pages of 0\.01 MiB .* leaves room for 5 pages"):
        plan(folder, available=room, num_pages=6)


def test_less_than_one_request_of_full_length_is_refused(folder: Path) -> None:
    enough = 2 * (1000 * 16 * 8 + 7 * PAGE_BYTES)
    assert plan(folder, available=enough).num_pages == 7
    with pytest.raises(ConfigError, match=r"7 KV pages .* leaves room for 6 pages; lower max_model_len"):
        plan(folder, available=enough - 2)


def test_b29_a_large_vocabulary_under_a_memory_cap_is_planned_or_refused_with_numbers(folder: Path) -> None:
    vocab = 150_000
    one_row = vocab * 4 * LOGITS_COPIES
    # Eight requests with 2 x 8 open positions: 128 rows of logits would be 300 MiB.
    made = plan(folder, available=400 * MIB, vocab_size=vocab, max_num_reqs=8)
    assert made.max_logits_rows == 40 * MIB // one_row == 17
    assert made.logits_bytes == 17 * one_row
    assert made.cache_bytes + made.logits_bytes <= 200 * MIB
    with pytest.raises(ConfigError) as caught:
        plan(folder, available=30 * MIB, vocab_size=vocab, max_num_reqs=8)
    message = str(caught.value)
    assert "logits of 8 rows x 150000 ids (0.02 GiB)" in message
    assert "gpu_memory_utilization 0.5 of 0.03 GiB free leaves room for 0 pages" in message
    assert "lower max_model_len, max_num_reqs or num_pages, or raise gpu_memory_utilization" in message
