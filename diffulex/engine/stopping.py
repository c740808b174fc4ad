"""When an answer ends and where it is cut: stop ids and strings, lengths, forward limits, repetition, stalls.

A `StopRules` belongs to one request and looks only at what the last forward wrote. Nothing here returns a
mask id: an answer ends at the first position that is not filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from diffulex.engine.request import MultiBlockReqTemplate


class TextStream(Protocol):
    """Turns arriving tokens into text that will not change any more."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that became stable through `ids`."""
        ...


class TextCodec(Protocol):
    """Turns tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        ...


class StopStrings:
    """Finds the earliest stop string in a text that grows, across token and block borders.

    With a marker such as ``</think>``, a text that opens with the matching ``<think>`` is searched only
    behind the first marker.
    """

    def __init__(self, stops: Sequence[str], marker: str | None, stream: TextStream) -> None:
        self._stops = tuple(stops)
        self._overlap = max(len(stop) for stop in stops) - 1
        self._marker = marker
        self._stream = stream
        self._text = ""
        self._searched = 0

    def push(self, ids: Sequence[int]) -> int | None:
        """Character offset of the earliest stop string once there is one, else None."""
        self._text += self._stream.push(ids)
        first = self._first_offset()
        if first is None:
            return None
        start = max(self._searched - self._overlap, first, 0)
        hits = [self._text.find(stop, start) for stop in self._stops]
        self._searched = len(self._text)
        return min((hit for hit in hits if hit >= 0), default=None)

    def _first_offset(self) -> int | None:
        """Where the search may begin; None while the text may still turn out to be a thinking part."""
        if self._marker is None:
            return 0
        opening, begin = self._marker.replace("/", "", 1), self._text.lstrip()
        if not begin.startswith(opening):
            return None if opening.startswith(begin) else 0
        found = self._text.find(self._marker)
        if found < 0:
            return None
        # White space between the thinking part and the answer belongs to neither.
        behind = self._text[found + len(self._marker) :]
        return len(self._text) - len(behind.lstrip())


class StopRules:
    """Decides after each forward whether one request is done.

    Priority when several rules hold: stop string, stop id, max_tokens, max_model_len, max_nfe,
    max_repetition_run, stall guard.
    """

    def __init__(self, req: MultiBlockReqTemplate) -> None:
        params = req.sampling_params
        self._req = req
        self._eos_ids = () if params.ignore_eos else req.rules.eos_token_ids
        self._stop_ids = params.stop_token_ids
        self._strings: StopStrings | None = None
        self._codec: TextCodec | None = None
        self._num_read = 0
        self._idle_forwards = 0
        self._pending: str | None = None
        self._cut_end: int | None = None
        self.first_stop: int | None = None
        self.text_end: int | None = None

    def attach_text(self, codec: TextCodec, stream: TextStream) -> None:
        """Gives the rules the tokenizer; needed before the first forward when there are stop strings."""
        params = self._req.sampling_params
        self._codec = codec
        self._strings = StopStrings(params.stop, params.stop_after, stream)

    @property
    def output_end(self) -> int:
        """One past the last position of the answer as known so far."""
        req = self._req
        end = min(req.frontier, req.limit)
        for cut in (self.first_stop, self._cut_end):
            end = end if cut is None else min(end, cut)
        return end

    def update(self, positions: NDArray[np.int64], tokens: NDArray[np.int64], *, sampled: bool) -> None:
        """Takes in the writes of one forward and ends the request when a rule says so."""
        req = self._req
        if self._pending is not None:
            req.finish(self._pending)
            return
        self._find_stop_ids(positions, tokens)
        grew = self.output_end > req.num_prompt + self._num_read
        if grew and self._find_stop_string():
            self._end("stop_string")
            return
        reason = self._soft_reason()
        if reason is not None:
            self._end(reason)
            return
        reason = self._hard_reason(len(positions), grew=grew, sampled=sampled)
        self._num_read = max(self.output_end - req.num_prompt, self._num_read)
        if reason is not None:
            req.finish(reason)

    def check_passes(self) -> None:
        """Ends the request after a forward that wrote nothing, if it was the last one allowed."""
        if self._is_out_of_passes():
            self._req.finish(self._pending or "max_nfe_reached")

    def _is_out_of_passes(self) -> bool:
        limit = self._req.sampling_params.max_nfe
        return limit is not None and self._req.nfe.total >= limit

    def _find_stop_ids(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        req, hit = self._req, np.zeros(len(tokens), np.bool_)
        for stop_id in (*self._eos_ids, *self._stop_ids):
            hit |= tokens == stop_id
        hits = positions[hit & (positions < req.limit)]
        if len(hits):
            first = int(hits.min())
            self.first_stop = first if self.first_stop is None else min(first, self.first_stop)
            req.is_terminal = True
            if req.rules.early_eos_stop:
                # Later blocks never influence earlier ones, so nothing behind the stop matters any more.
                req.drop_blocks_after(self.first_stop)

    def _find_stop_string(self) -> bool:
        if self._strings is None or self._codec is None:
            return False
        req = self._req
        start, end = req.num_prompt, self.output_end
        offset = self._strings.push(req.tokens[start + self._num_read : end].tolist())
        if offset is None:
            return False
        ids = req.tokens[start:end].tolist()
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._codec.decode(ids[:middle])) >= offset:
                high = middle
            else:
                low = middle + 1
        self._cut_end, self.text_end = start + low, offset
        return True

    def _soft_reason(self) -> str | None:
        """Stop id or length, once every position that belongs to the answer is filled."""
        req, first = self._req, self.first_stop
        if first is not None and req.frontier > first:
            waits = not req.rules.early_eos_stop and not all(block.is_complete for block in req.window)
            if not waits or req.frontier >= req.limit:
                is_eos = int(req.tokens[first]) in self._eos_ids
                return "eos_token_generated" if is_eos else "stop_token"
        if req.frontier >= req.limit:
            by_tokens = req.limit == req.num_prompt + req.sampling_params.max_tokens
            return "max_new_tokens_reached" if by_tokens else "max_model_len_reached"
        return None

    def _hard_reason(self, num_filled: int, *, grew: bool, sampled: bool) -> str | None:
        req, params = self._req, self._req.sampling_params
        if self._is_out_of_passes():
            return "max_nfe_reached"
        if params.max_repetition_run is not None and grew and self._repeats(params.max_repetition_run):
            return "max_repetition_run_reached"
        if req.rules.auto_max_nfe and sampled:
            return self._stall_reason(num_filled)
        return None

    def _repeats(self, limit: int) -> bool:
        req = self._req
        answer = req.tokens[req.num_prompt : self.output_end]
        differs = answer[::-1] != answer[-1]
        run = int(np.argmax(differs)) if differs.any() else len(answer)
        if run < limit:
            return False
        if req.sampling_params.trim_repetition_run:
            self._cut_end = self.output_end - run + 1
        return True

    def _stall_reason(self, num_filled: int) -> str | None:
        """Ends a request that has filled nothing for a while, or on average too little, to get anywhere."""
        req, rules = self._req, self._req.rules
        self._idle_forwards = 0 if num_filled else self._idle_forwards + 1
        warmup = rules.auto_max_nfe_warmup_steps
        slow = req.num_decoded < rules.auto_max_nfe_tpf_floor * req.nfe.denoise
        stalled = self._idle_forwards >= warmup or (req.nfe.denoise >= warmup and slow)
        return "stalled" if stalled else None

    def _end(self, reason: str) -> None:
        """Finishes now, or after one last forward that stores what is finished but not stored."""
        req = self._req
        if not req.rules.skip_final_store and not self._is_out_of_passes():
            req.drain()
            if req.window:
                self._pending = reason
                return
        req.finish(reason)
