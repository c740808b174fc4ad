"""A finished request -> the `RequestOutput` that users get."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from diffulex.utils.output import NfeCounts, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.engine.request import MultiBlockReqTemplate


class Decoder(Protocol):
    """The part of the tokenizer that outputs need."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`."""
        ...


#: Reasons after which open positions are meant to stay open; nothing was lost.
_REGULAR_ENDS = frozenset(
    {"eos_token_generated", "stop_token", "stop_string", "max_new_tokens_reached", "max_model_len_reached"}
)


def build_output(req: MultiBlockReqTemplate, tokenizer: Decoder) -> RequestOutput:
    """The result of `req`, which has finished; text is cut at the stop string that ended it, if one did."""
    if req.completion_reason is None:
        raise ValueError(f"request {req.req_id} has not finished")
    token_ids, full_ids = req.output_ids(), req.full_output_ids()
    text = tokenizer.decode(token_ids)
    text_end = req.stop_rules.text_end
    return RequestOutput(
        req_id=req.req_id,
        token_ids=token_ids,
        full_token_ids=full_ids,
        text=text if text_end is None else text[:text_end],
        full_text=tokenizer.decode(full_ids, skip_special_tokens=False),
        completion_reason=req.completion_reason,
        num_prompt_tokens=req.num_prompt,
        num_cached_tokens=req.num_cached_tokens or 0,
        num_decoded_tokens=req.num_decoded,
        num_unfilled=0 if req.completion_reason in _REGULAR_ENDS else req.num_unfilled,
        num_preemptions=req.num_preemptions,
        num_forward_tokens=req.num_forward_tokens,
        nfe=req.nfe,
        arrival_time=req.arrival_time,
        first_token_time=req.first_token_time,
        finish_time=req.finish_time,
        error=req.error,
        trajectory=req.trajectory,
    )


def invalid_output(index: int, message: str) -> RequestOutput:
    """The result of a prompt that could not be queued."""
    now = time.perf_counter()
    return RequestOutput(
        req_id=index,
        token_ids=[],
        full_token_ids=[],
        text="",
        full_text="",
        completion_reason="error",
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_decoded_tokens=0,
        num_unfilled=0,
        num_preemptions=0,
        num_forward_tokens=0,
        nfe=NfeCounts(),
        arrival_time=now,
        first_token_time=None,
        finish_time=now,
        error=message,
    )
