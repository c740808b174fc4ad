"""One request: its tokens, its blocks, which positions the next forward holds, what its results change.

The engine makes it, the scheduler drives it, the runner reads it. It lives in the engine's process and holds
numpy arrays only. Positions are absolute: the first prompt token is position 0.

Geometry. The *head* is the part of the prompt that needs no denoising, ``[0, head_end)``. Behind it lie
blocks of ``block_size`` positions, counted from 0; the first may begin with prompt tokens. The *window* holds
the blocks that are open (ACTIVE) or wait to be stored (TO_CACHE); every block left of it has been stored
once.
"""

from __future__ import annotations

import hashlib
import time
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from diffulex.engine.block import BlockStatus, DiffusionBlock
from diffulex.engine.plan import ForwardKind, RequestSpan
from diffulex.engine.rules import DecodeRules
from diffulex.engine.stopping import StopRules
from diffulex.sampling_params import SamplingParams
from diffulex.utils.output import BlockTrace, NfeCounts, StepRecord
from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from diffulex.config import Config


class ReqStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class DllmReq:
    """What the engine needs of any request, whatever the strategy.

    Raises:
        ValueError: the prompt is empty, holds an id that is no token, or leaves no room for an answer.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        config: Config | None = None,
    ) -> None:
        self.sampling_params = sampling_params if sampling_params is not None else SamplingParams()
        self.rules = self.make_rules(config)
        self.num_prompt = len(token_ids)
        self.req_id = -1
        self.slot = -1
        self.status = ReqStatus.WAITING
        self.completion_reason: str | None = None
        self.error: str | None = None
        self.nfe = NfeCounts()
        self.num_forward_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.finish_time = 0.0
        self.trajectory: list[StepRecord] = []
        limit = self.rules.max_model_len
        if self.num_prompt == 0:
            raise ValueError("the prompt is empty; give at least one token")
        if self.num_prompt >= limit:
            raise ValueError(
                f"the prompt has {self.num_prompt} tokens, max_model_len is {limit}: no room is left for an "
                "answer; shorten the prompt or raise max_model_len"
            )

    @classmethod
    def make_rules(cls, config: Config | None) -> DecodeRules:
        """Rules of the request; the defaults of the settings without a configuration."""
        return DecodeRules() if config is None else DecodeRules.from_config(config)

    @property
    def is_finished(self) -> bool:
        """True once the request has its completion reason."""
        return self.status is ReqStatus.FINISHED


class MultiBlockReqTemplate(DllmReq):
    """Block diffusion with one or more open blocks on the absolute grid, block-causal, prompt included."""

    #: A long prompt may be prefilled piece by piece; False where a prompt token sees the whole prompt.
    can_split_prefill: ClassVar[bool] = True

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(token_ids, sampling_params, config)
        rules, params = self.rules, self.sampling_params
        size = rules.block_size
        self.head_end = self.choose_head_end()
        self.limit = min(self.num_prompt + params.max_tokens, rules.max_model_len)
        self.num_blocks = -(-(self.limit - self.head_end) // size)
        capacity = self.head_end + self.num_blocks * size
        self.tokens: NDArray[np.int64] = np.full(capacity, rules.mask_token_id, np.int64)
        self.tokens[: self.num_prompt] = token_ids
        # A mask id inside the prompt is an ordinary token: positions, not ids, say what is open.
        self.filled: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self.filled[: self.num_prompt] = True
        self.frontier = self.num_prompt
        self.num_decoded = 0
        self.window: list[DiffusionBlock] = []
        self.num_committed = 0
        self.stored_end = 0
        self.pages: list[int] = []
        self.is_terminal = False
        self.is_draining = False
        self.stop_rules = StopRules(self)
        self._rebuild_until = 0
        if self.num_prompt > self.head_end:
            self._open_block()
        self.open_next_block()

    # Geometry ---------------------------------------------------------------------------------------------

    def choose_head_end(self) -> int:
        """End of the prompt part that is prefilled: the whole blocks of the prompt."""
        return self.num_prompt // self.rules.block_size * self.rules.block_size

    def visible_ends(self, start: int, end: int) -> NDArray[np.int32]:
        """``[end - start] int32``: position ``start + i`` sees positions ``[0, result[i])``."""
        size = self.rules.block_size
        return ((np.arange(start, end) // size + 1) * size).astype(np.int32)

    @property
    def window_start(self) -> int:
        """First position of the window; everything before it is final."""
        return self.head_end + self.num_committed * self.rules.block_size

    @property
    def window_end(self) -> int:
        """One past the last open position; dummies are not counted."""
        return self.window_start + len(self.window) * self.rules.block_size

    @property
    def final_end(self) -> int:
        """End of the positions whose tokens can no longer change: the head and every finished block."""
        num_final = 0
        for block in self.window:
            if block.status is not BlockStatus.TO_CACHE:
                break
            num_final += 1
        return self.window_start + num_final * self.rules.block_size

    @property
    def max_stored_end(self) -> int:
        """End of the positions whose KV the request may ever store; what the page pool must hold."""
        if self.rules.skip_final_store:
            return len(self.tokens) - self.rules.block_size
        return len(self.tokens)

    @property
    def reusable_end(self) -> int:
        """Positions ``[0, result)`` may come from the prefix cache.

        Never the window, so that cached and computed runs take the same steps. Families that predict position
        i from row i - 1 recompute the last position before the window, since its row is needed.
        """
        return self.window_start - 1 if self.rules.shift_logits else self.window_start

    # Before a forward -------------------------------------------------------------------------------------

    def next_span(self, budget: int, *, whole: bool = False) -> RequestSpan | None:
        """Positions of the next forward in at most `budget` rows; None when nothing fits.

        A prefill or rebuild that does not fit is cut at a block border before the window. `whole` lifts the
        budget for what cannot be cut, so that the first request of a step always goes on.
        """
        start, end = self.stored_end, self.window_end
        if not self.rules.skip_dummy_blocks and self.window and not self.is_draining:
            size, slots = self.rules.block_size, self.rules.window_slots
            end = min(self.window_start + slots * size, len(self.tokens))
        if end - start <= budget or (whole and (not self.can_split_prefill or start >= self.window_start)):
            samples = any(block.status is BlockStatus.ACTIVE for block in self.window)
            return RequestSpan(self, start, end, self.final_end, samples, self._kind(start, samples))
        if not self.can_split_prefill:
            return None
        size = self.rules.block_size
        end = min((start + budget) // size * size, self.window_start)
        if end <= start and whole:
            end = min(start // size * size + size, self.window_start)
        if end <= start:
            return None
        return RequestSpan(self, start, end, end, False, self._kind(start, False))

    def _kind(self, start: int, samples: bool) -> ForwardKind:
        if samples:
            return ForwardKind.DENOISE
        if start < self._rebuild_until:
            return ForwardKind.REBUILD
        return ForwardKind.PREFILL if start < self.head_end else ForwardKind.STORE

    def sample_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Open positions of the window, the window block each lies in, and which blocks may be forced.

        A block may be forced to fill one position when its left neighbour is semi-complete. Neighbours left
        of the window are complete. All of it describes the state before this step's writes.
        """
        start = self.window_start
        positions = np.flatnonzero(~self.filled[start : self.window_end]) + start
        blocks = (positions - start) // self.rules.block_size
        threshold = self.rules.thresholds.semi_complete_threshold
        force = np.ones(len(self.window), np.bool_)
        if not self.rules.always_force:
            force[1:] = [block.progress >= threshold for block in self.window[:-1]]
        return positions, blocks, force

    def uniforms(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """One number in ``[0, 1)`` a position, from the request's seed, the step and the position alone."""
        seed = self.sampling_params.seed
        key = _seed_key(self.rules.seed, self.req_id) if seed is None else seed % 2**64
        draws = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, self.nfe.denoise]))
        start = self.window_start
        return draws.random(self.window_end - start)[positions - start]

    # After a forward --------------------------------------------------------------------------------------

    def apply(
        self,
        span: RequestSpan,
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        """Takes in the results of `span`: fills `positions`, moves blocks on, checks the stop rules."""
        self.count_pass(span)
        self.stored_end = span.store_end
        if span.samples:
            self._count_block_steps()
        self._write(positions, tokens)
        if not span.samples and span.end < self.window_end:
            self.stop_rules.check_passes()
            return
        self._advance_blocks(span.store_end)
        self.stop_rules.update(positions, tokens, sampled=span.samples)
        if not self.is_finished:
            self.open_next_block()

    def count_pass(self, span: RequestSpan) -> None:
        """Counts a forward the request took part in, whatever came out of it."""
        setattr(self.nfe, span.kind.value, getattr(self.nfe, span.kind.value) + 1)
        self.num_forward_tokens += span.num_rows

    def _count_block_steps(self) -> None:
        for block in self.window:
            if block.status is BlockStatus.ACTIVE:
                block.total_steps += 1

    def _write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        if not len(positions):
            return
        self.tokens[positions] = tokens
        self.filled[positions] = True
        self.num_decoded += len(positions)
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        for block in self.window:
            if block.num_masks:
                block.num_masks = block.size - int(np.count_nonzero(self.filled[block.start : block.end]))
        rest = self.filled[self.frontier :]
        gap = int(np.argmin(rest)) if not rest.all() else len(rest)
        self.frontier += gap

    def _advance_blocks(self, store_end: int) -> None:
        """Moves stored blocks out of the window and finished ones, left to right, to TO_CACHE."""
        while self.window and self.window[0].end <= store_end:
            self.window.pop(0)
            self.num_committed += 1
        for block in self.window:
            if block.status is BlockStatus.ACTIVE:
                if block.is_complete:
                    block.commit_ready, block.same_token_ratio = True, 1.0
                if not (block.is_complete and block.commit_ready):
                    break
                block.status = BlockStatus.TO_CACHE

    def open_next_block(self) -> None:
        """Opens at most one block for the next forward, if the last one has come far enough."""
        full = len(self.window) >= self.rules.window_slots
        if self.is_terminal or full or self.num_committed + len(self.window) >= self.num_blocks:
            return
        if not self.window:
            if self.stored_end >= self.window_start or self.rules.activate_in_prefill:
                self._open_block()
            return
        last = self.window[-1]
        stable = last.same_token_ratio >= self.rules.thresholds.token_stability_threshold
        if stable and last.progress >= self.rules.add_block_threshold:
            self._open_block()

    def _open_block(self) -> None:
        start, size = self.window_end, self.rules.block_size
        num_masks = size - int(np.count_nonzero(self.filled[start : start + size]))
        index = self.num_committed + len(self.window)
        self.window.append(DiffusionBlock(index, start, size, num_masks))

    def drop_blocks_after(self, position: int) -> None:
        """Gives up the open blocks behind the one that holds `position`."""
        self.window = [block for block in self.window if block.start <= position]

    def drain(self) -> None:
        """Keeps only the finished blocks, to be stored by one last forward."""
        self.window = [block for block in self.window if block.status is BlockStatus.TO_CACHE]
        self.is_terminal = self.is_draining = True

    # Life -------------------------------------------------------------------------------------------------

    def admit(self, num_cached: int) -> None:
        """Puts the request into the batch with `num_cached` positions served by the prefix cache."""
        self.status = ReqStatus.RUNNING
        self.stored_end = num_cached
        if not self.window:
            self.open_next_block()

    def withdraw(self) -> None:
        """Takes an admission back before anything was forwarded."""
        self.status = ReqStatus.WAITING
        self.stored_end = 0

    def evict(self) -> None:
        """Forgets the stored KV after the pages were taken away; tokens and window stay."""
        self.status = ReqStatus.WAITING
        self._rebuild_until = max(self._rebuild_until, self.stored_end)
        self.stored_end = 0
        self.num_preemptions += 1

    def finish(self, reason: str, error: str | None = None) -> None:
        """Ends the request; the first reason stays."""
        if not self.is_finished:
            self.status = ReqStatus.FINISHED
            self.completion_reason, self.error = reason, error
            self.finish_time = time.perf_counter()

    # Reading ----------------------------------------------------------------------------------------------

    @property
    def num_unfilled(self) -> int:
        """Masked positions below the limit inside the window."""
        end = min(self.window_end, self.limit)
        return int(np.count_nonzero(~self.filled[self.num_prompt : end]))

    def output_ids(self) -> list[int]:
        """Answer before the first stop, without gaps and without mask ids."""
        result: list[int] = self.tokens[self.num_prompt : self.stop_rules.output_end].tolist()
        return result

    def full_output_ids(self) -> list[int]:
        """Everything filled without a gap behind the prompt."""
        result: list[int] = self.tokens[self.num_prompt : self.frontier].tolist()
        return result

    def record(
        self, span: RequestSpan, filled: list[tuple[int, int, float]], step: tuple[int, float]
    ) -> None:
        """Adds a trace record of the step ``(id, seconds)``."""
        start, end = self.window_start, self.window_end
        blocks = tuple(
            BlockTrace(block.index, block.status.name, block.num_masks, block.progress)
            for block in self.window
        )
        tokens = tuple(self.tokens[start:end].tolist())
        number, seconds = step
        rows = (span.start, span.end, tuple(filled))
        self.trajectory.append(StepRecord(number, span.kind.value, seconds, *rows, start, tokens, blocks))


def _seed_key(base: int, req_id: int) -> int:
    digest = hashlib.blake2b(f"{base}:{req_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class _ReqRegistry(Registry[DllmReq]):
    """Request classes by decoding strategy."""


AutoReq: _ReqRegistry = _ReqRegistry("request", DllmReq)
