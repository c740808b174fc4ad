from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from diffulex.attention.metadata import (
    AttnMetaDataBase,
    MetadataSlot,
    fetch_attn_metadata,
    set_fetch_fn_for_attn_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(eq=False)
class Richer(AttnMetaDataBase):
    extra: int = 3


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    set_fetch_fn_for_attn_metadata(None)


def test_all_fields_have_defaults_and_scratch_is_not_shared() -> None:
    first, second = AttnMetaDataBase(), AttnMetaDataBase()
    first.scratch["plan"] = 1
    assert second.scratch == {}
    assert (first.cu_q_lens.numel(), first.page_tables.shape, first.attn_impl) == (0, (0, 0), "naive")


def test_a_slot_holds_what_was_set_last_until_reset() -> None:
    slot = MetadataSlot(Richer)
    assert slot.fetch().extra == 3
    slot.set(extra=5, page_size=8)
    held = slot.fetch()
    assert (held.extra, held.page_size) == (5, 8)
    assert slot.fetch() is held
    slot.reset()
    assert slot.fetch().extra == 3


def test_layers_fetch_from_the_bound_function() -> None:
    slot = MetadataSlot(Richer)
    set_fetch_fn_for_attn_metadata(slot.fetch)
    slot.set(context_lens=torch.tensor([4]))
    assert fetch_attn_metadata() is slot.fetch()


def test_fetching_without_a_bound_function_says_what_to_call() -> None:
    set_fetch_fn_for_attn_metadata(None)
    with pytest.raises(RuntimeError, match="set_fetch_fn_for_attn_metadata"):
        fetch_attn_metadata()
