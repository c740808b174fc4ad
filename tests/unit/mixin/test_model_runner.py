"""Forward and sample: how many logits exist at a time, boundary rows, metadata of two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.attention.metadata import (
    AttnMetaDataBase,
    MetadataSlot,
    fetch_attn_metadata,
    set_fetch_fn_for_attn_metadata,
)
from diffulex.mixin.multi_block.attention_metadata import MultiBlockAttnMetaDataMixin
from diffulex.strategy.multi_bd.attention.metadata import MultiBDAttnMetaData
from tests.support.engines import FakeRunner, Twist
from tests.support.tables import answer, hash_harness, table, table_harness

if TYPE_CHECKING:
    import torch

    from tests.support.engines import Harness

PROMPTS = [[3], [4, 5, 6, 7, 8], [9] * 12, [10, 11, 12, 13]]


def watch_logits(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call for logits from now on."""
    sizes: list[int] = []
    plain = harness.runner.model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(hidden)

    monkeypatch.setattr(harness.runner.model, "compute_logits", counted)
    return sizes


def play(harness: Harness, **params: Any) -> list[Any]:
    for prompt in PROMPTS:
        harness.add(prompt, max_tokens=20, **params)
    harness.run()
    return [(req.output_ids(), req.nfe.as_dict()) for req in harness.requests]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}])
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_logits_of_few_rows_at_a_time_give_the_same_decisions(
    stub: str, monkeypatch: pytest.MonkeyPatch, rows: int, params: dict[str, float], shift: bool
) -> None:
    Twist.shift = shift
    wanted = play(hash_harness(stub, buffer_size=3, accept_threshold=0.6), **params)
    harness = hash_harness(stub, buffer_size=3, accept_threshold=0.6)
    harness.runner.max_logits_rows = rows
    sizes = watch_logits(harness, monkeypatch)
    assert play(harness, **params) == wanted
    # Pieces end at block borders, so one block of four is the least.
    assert max(sizes) <= max(rows, 4)


def test_a_piece_is_as_large_as_the_limit_allows(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = table_harness(stub, table({}), buffer_size=3, add_block_threshold=0.0)
    for _ in range(3):
        harness.add([5, 5, 5, 5], max_tokens=40)
    harness.runner.max_logits_rows = 8
    sizes = watch_logits(harness, monkeypatch)
    harness.step()
    assert sizes == [8, 4]


@pytest.mark.parametrize("shift", [False, True])
def test_logits_of_all_rows_change_nothing_but_their_number(
    stub: str, monkeypatch: pytest.MonkeyPatch, shift: bool
) -> None:
    Twist.shift = shift
    few = hash_harness(stub)
    few_sizes = watch_logits(few, monkeypatch)
    many = hash_harness(stub, needed_logits_only=False)
    many_sizes = watch_logits(many, monkeypatch)
    assert play(few) == play(many)
    assert sum(few_sizes) < sum(many_sizes)


def test_only_rows_that_are_read_get_logits(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = table_harness(stub, table({}))
    harness.add([5] * 13, max_tokens=3)
    sizes = watch_logits(harness, monkeypatch)
    harness.step()
    assert sizes == [3]


def test_the_first_open_position_is_predicted_by_the_row_behind_the_stored_part(stub: str) -> None:
    Twist.shift = True
    # Row 7 stands behind the prompt; only the first forward computes it.
    predictions = answer(0, [5] * 60, 0.3) | {7: (9, 0.2)} | {8: (11, 0.4)}
    harness = table_harness(stub, table(predictions), num_pages=32)
    req = harness.add([4] * 8, max_tokens=4)
    harness.run()
    # Position 8 is filled last, from the row that the first forward kept.
    assert [step[0][0] for step in harness.accepted[0]][-1] == 8
    assert req.output_ids() == [9, 11, 5, 5]


def test_a_forward_leaves_no_metadata_behind_even_when_it_fails(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = hash_harness(stub)
    harness.add([5, 6], max_tokens=8)
    harness.step()
    assert fetch_attn_metadata().cu_q_lens.numel() == 0

    def fail() -> None:
        raise RuntimeError("device lost")

    harness.runner.model.on_forward = fail
    with pytest.raises(RuntimeError, match="device lost"):
        harness.step()
    assert fetch_attn_metadata().cu_q_lens.numel() == 0


def test_metadata_that_others_bound_meanwhile_are_not_read(stub: str) -> None:
    plain = play(hash_harness(stub))
    harness = hash_harness(stub)

    def nothing() -> AttnMetaDataBase:
        raise AssertionError("another engine's metadata")

    for prompt in PROMPTS:
        harness.add(prompt, max_tokens=20)
    while not harness.scheduler.is_finished():
        set_fetch_fn_for_attn_metadata(nothing)
        harness.step()
    assert [(req.output_ids(), req.nfe.as_dict()) for req in harness.requests] == plain


def test_a_runner_must_name_its_metadata(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "attn_metadata", None)
    with pytest.raises(TypeError, match="FakeRunner names no attention metadata; set attn_metadata"):
        hash_harness(stub)


def test_a_runner_may_bind_metadata_functions_before_it_is_made(
    stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = play(hash_harness(stub))
    slot = MetadataSlot(MultiBDAttnMetaData)
    plain = FakeRunner.__init__

    def bind(self: FakeRunner, *args: Any) -> None:
        self.init_attn_metadata_fn(slot.set, slot.reset, slot.fetch)
        plain(self, *args)

    monkeypatch.setattr(FakeRunner, "attn_metadata", None)
    monkeypatch.setattr(FakeRunner, "__init__", bind)
    assert play(hash_harness(stub)) == wanted


def test_block_geometry_of_the_metadata_is_checked() -> None:
    class Metadata(MultiBlockAttnMetaDataMixin):
        pass

    good = Metadata()
    good.init_multi_block()
    assert (good.block_size, good.buffer_size) == (1, 1)
    for name in ("block_size", "buffer_size"):
        wrong = Metadata(**{name: 0})
        with pytest.raises(ValueError, match=f"{name} \\(0\\)"):
            wrong.init_multi_block()
