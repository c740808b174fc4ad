"""Chooses what the next forward holds and applies what came back: admission, pages, preemption, results.

Requests run in the order of their arrival. Prefill, decoding and rebuilding are one thing here: every request
in the batch forwards what is not stored yet, up to the end of its window, within the token budget. A request
that lacks pages takes them from the youngest; the oldest is never preempted, so somebody always gets on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from diffulex.engine.kv_cache_manager import AutoKVCacheManager, MultiBlockKVCacheManagerTemplate
from diffulex.engine.plan import RequestSpan, StepPlan, StepResult
from diffulex.logger import get_logger
from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from diffulex.config import Config
    from diffulex.engine.request import MultiBlockReqTemplate

logger = get_logger(__name__)


class SchedulerBase(ABC):
    """What the engine calls; one object per engine, in the engine's process."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def add(self, req: MultiBlockReqTemplate) -> None:
        """Queues `req`; raises ValueError when it could never end."""

    @abstractmethod
    def schedule(self) -> StepPlan:
        """The next forward."""

    @abstractmethod
    def postprocess(self, plan: StepPlan, result: StepResult) -> list[MultiBlockReqTemplate]:
        """Applies `result`; returns the requests that ended."""

    @abstractmethod
    def abort(self, req_id: int) -> MultiBlockReqTemplate | None:
        """Ends a queued or running request; None when there is none of that id."""

    @abstractmethod
    def is_finished(self) -> bool:
        """True when nothing is queued or running."""


class MultiBlockSchedulerTemplate(SchedulerBase):
    """First come, first served, with ragged batches and preemption of the youngest.

    Raises:
        RuntimeError: `schedule` finds requests but can place none of them, which is a fault of the engine.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        manager = AutoKVCacheManager.get(config.decoding_strategy)(config)
        if not isinstance(manager, MultiBlockKVCacheManagerTemplate):
            raise TypeError(f"{type(manager).__name__} is no MultiBlockKVCacheManagerTemplate")
        self.kv_cache_manager = manager
        self.max_num_reqs = config.max_num_reqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.waiting: deque[MultiBlockReqTemplate] = deque()
        self.running: list[MultiBlockReqTemplate] = []
        self._free_slots = list(range(config.max_num_reqs - 1, -1, -1))
        self._num_steps = 0

    # Requests in and out ----------------------------------------------------------------------------------

    def check_fits(self, req: MultiBlockReqTemplate) -> None:
        """Refuses a request that could never end because the whole pool is too small for it.

        Raises:
            ValueError: names the pages needed and the pages there are.
        """
        manager = self.kv_cache_manager
        needed = manager.num_pages_for(req.max_stored_end)
        if needed > manager.pool.num_pages:
            raise ValueError(
                f"the request may need {needed} KV pages ({req.num_prompt} prompt tokens, up to "
                f"{req.limit - req.num_prompt} new ones, page_size {manager.page_size}), num_pages is "
                f"{manager.pool.num_pages}; raise num_pages or lower max_tokens"
            )

    def add(self, req: MultiBlockReqTemplate) -> None:
        """Queues `req` behind the others."""
        self.check_fits(req)
        self.waiting.append(req)

    def abort(self, req_id: int) -> MultiBlockReqTemplate | None:
        """Ends request `req_id` now and frees what it holds; None when it is neither queued nor running."""
        for group in (self.running, self.waiting):
            for req in group:
                if req.req_id == req_id:
                    group.remove(req)
                    req.finish("aborted")
                    self._release(req)
                    return req
        return None

    def is_finished(self) -> bool:
        """True when nothing is queued or running."""
        return not self.waiting and not self.running

    # Before the forward -----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The spans of the next forward, in order of arrival, within the token budget."""
        spans: list[RequestSpan] = []
        budget = self.max_num_batched_tokens
        for req in tuple(self.running):
            if req not in self.running:
                break
            span = req.next_span(budget, whole=not spans)
            if span is None:
                break
            self._make_room(req, span.store_end)
            if req not in self.running:
                break
            self.kv_cache_manager.grow(req, span.store_end)
            spans.append(span)
            budget -= span.num_rows
        else:
            # Newcomers only when nobody before them had to wait.
            self._admit(spans, budget)
        if not spans and not self.is_finished():
            raise RuntimeError(self._stuck_message())
        plan = StepPlan(self._num_steps, tuple(spans))
        self._num_steps += 1
        return plan

    def _make_room(self, req: MultiBlockReqTemplate, end: int) -> None:
        """Preempts from the youngest until `req` can store ``[0, end)`` or is itself preempted."""
        while not self.kv_cache_manager.can_grow(req, end):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is req:
                break

    def preempt(self, req: MultiBlockReqTemplate) -> None:
        """Takes the pages of a running request and puts it at the head of the queue."""
        self.running.remove(req)
        self._release(req)
        req.evict()
        self.waiting.appendleft(req)
        logger.debug("request %d preempted, %d pages free", req.req_id, self.kv_cache_manager.pool.num_free)

    def _admit(self, spans: list[RequestSpan], budget: int) -> None:
        manager = self.kv_cache_manager
        while self.waiting and len(self.running) < self.max_num_reqs and budget > 0:
            req = self.waiting[0]
            chain = manager.find_prefix(req)
            num_cached = len(chain) * manager.page_size
            req.admit(num_cached)
            span = req.next_span(budget, whole=not spans)
            # One page is kept back for each running request, or its next block would evict the newcomer.
            num_spare = manager.num_free_without(chain) - len(self.running)
            if span is None or manager.num_pages_for(span.store_end) - len(chain) > num_spare:
                req.withdraw()
                break
            self.waiting.popleft()
            self.running.append(req)
            req.slot = self._free_slots.pop()
            if req.num_cached_tokens is None:
                req.num_cached_tokens = min(num_cached, req.num_prompt)
            manager.adopt(req, chain)
            manager.grow(req, span.store_end)
            spans.append(span)
            budget -= span.num_rows

    # After the forward ------------------------------------------------------------------------------------

    def postprocess(self, plan: StepPlan, result: StepResult) -> list[MultiBlockReqTemplate]:
        """Applies the results request by request; one that failed ends alone."""
        finished: list[MultiBlockReqTemplate] = []
        for index, span in enumerate(plan.spans):
            req = span.req
            failure = result.failed.get(index)
            if failure is not None:
                req.count_pass(span)
                req.finish("error", f"request {req.req_id}, step {plan.step_id}: {failure}")
            else:
                rows = slice(result.row_offsets[index], result.row_offsets[index + 1])
                accepted = result.accepted[rows]
                req.apply(span, result.positions[rows][accepted], result.tokens[rows][accepted])
                self.kv_cache_manager.register_stored(req)
            if req.is_finished:
                self.running.remove(req)
                self._release(req)
                finished.append(req)
        return finished

    def _release(self, req: MultiBlockReqTemplate) -> None:
        self.kv_cache_manager.free(req)
        if req.slot >= 0:
            self._free_slots.append(req.slot)
            req.slot = -1

    def _stuck_message(self) -> str:
        pool = self.kv_cache_manager.pool
        return (
            f"nothing can be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
            f"{pool.num_free} of {pool.num_pages} pages free, budget {self.max_num_batched_tokens} tokens"
        )


class _SchedulerRegistry(Registry[SchedulerBase]):
    """Schedulers by decoding strategy."""


AutoScheduler: _SchedulerRegistry = _SchedulerRegistry("scheduler", SchedulerBase)
