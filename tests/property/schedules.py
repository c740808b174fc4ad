"""Random schedules for the engine's parts, checks that hold after every step, and what they must end in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from diffulex.engine.block import BlockStatus
from tests.support.hash_model import logits_of, token_digests, two_layers
from tests.support.reference_loop import LoopResult, LoopRules, block_diffusion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.engines import FakeReq, Harness

VOCAB, MASK_ID, EOS_IDS = 23, 0, (1, 2)
VOCAB_LIMIT = 23


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule."""

    prompt: list[int]
    max_tokens: int
    at_step: int
    abort_at: int | None


@dataclass(frozen=True)
class Schedule:
    """Settings and arrivals of one random run."""

    block_size: int
    buffer_size: int
    page_size: int
    add: float
    semi: float
    accept: float
    shift: bool
    always_force: bool
    max_num_reqs: int
    spare_pages: int
    seed: int
    sharpness: float
    prefix_caching: bool
    max_model_len: int
    arrivals: list[Arrival]
    switches: dict[str, bool] = field(default_factory=dict)

    def rules(self) -> LoopRules:
        """The rules as the reference loop takes them."""
        return LoopRules(
            self.block_size,
            self.buffer_size,
            MASK_ID,
            EOS_IDS,
            add=self.add,
            semi=self.semi,
            accept=self.accept,
            max_model_len=self.max_model_len,
            shift=self.shift,
            always_force=self.always_force,
        )

    def settings(self, **changes: Any) -> dict[str, Any]:
        """The settings as the configuration takes them; the pool holds the longest request and some spare."""
        longest = max(
            min(len(one.prompt) + one.max_tokens, self.max_model_len) + self.block_size
            for one in self.arrivals
        )
        return {
            "block_size": self.block_size,
            "buffer_size": self.buffer_size,
            "page_size": self.page_size,
            "add_block_threshold": self.add,
            "semi_complete_threshold": self.semi,
            "accept_threshold": self.accept,
            "max_num_reqs": self.max_num_reqs,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_model_len,
            "num_pages": -(-longest // self.page_size) + self.spare_pages,
            "enable_prefix_caching": self.prefix_caching,
            "seed": self.seed,
            **self.switches,
            **changes,
        }


@st.composite
def prompts(draw: st.DrawFn, shared: list[int], longest: int) -> list[int]:
    """A prompt that often begins like others; the mask id and stop ids may occur in it."""
    num_shared = draw(st.integers(0, len(shared)))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=longest))
    return (shared[:num_shared] + own)[:longest] or [5]


@st.composite
def schedules(draw: st.DrawFn, *, switches: bool = False, aborts: bool = True) -> Schedule:
    """Any schedule that the configuration allows."""
    block_size = draw(st.sampled_from([4, 8]))
    page_size = draw(st.sampled_from([size for size in (4, 8, 16, 32) if size >= block_size]))
    max_model_len = draw(st.sampled_from([48, 64, 200]))
    longest = min(44, max_model_len - 2)
    shared = draw(st.lists(st.integers(3, VOCAB - 1), min_size=0, max_size=32))
    arrivals = [
        Arrival(
            prompt=draw(prompts(shared, longest)),
            max_tokens=draw(st.integers(1, 40)),
            at_step=draw(st.integers(0, 12)),
            abort_at=draw(st.none() | st.integers(0, 25)) if aborts else None,
        )
        for _ in range(draw(st.integers(1, 6)))
    ]
    names = (
        "activate_in_prefill",
        "overlap_store",
        "early_eos_stop",
        "skip_final_store",
        "skip_dummy_blocks",
    )
    return Schedule(
        block_size=block_size,
        buffer_size=draw(st.integers(1, 4)),
        page_size=page_size,
        add=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        semi=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        accept=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        shift=draw(st.booleans()),
        always_force=draw(st.booleans()),
        max_num_reqs=draw(st.integers(1, 5)),
        spare_pages=draw(st.sampled_from([0, 1, 3, 200])),
        seed=draw(st.integers(0, 2**32)),
        sharpness=draw(st.sampled_from([0.3, 1.0, 4.0])),
        prefix_caching=draw(st.booleans()),
        max_model_len=max_model_len,
        arrivals=sorted(arrivals, key=lambda one: one.at_step),
        switches={name: draw(st.booleans()) for name in names} if switches else {},
    )


def expected(schedule: Schedule, arrival: Arrival) -> LoopResult:
    """What the reference loop makes of one prompt, alone and without any cache."""

    def predict(
        tokens: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        _, answers = two_layers(tokens, np.arange(len(tokens)), ends, schedule.seed)
        logits = logits_of(answers, VOCAB, schedule.sharpness)
        allowed = logits.clone()
        allowed[:, MASK_ID] = float("-inf")
        chosen = allowed.argmax(dim=-1)
        prob = (logits[torch.arange(len(chosen)), chosen] - logits.logsumexp(dim=-1)).exp()
        return chosen.numpy(), prob.numpy()

    rules = schedule.rules()
    rules.max_tokens = arrival.max_tokens
    return block_diffusion(arrival.prompt, rules, predict)


def run_schedule(harness: Harness, schedule: Schedule, *, check: bool = True) -> list[FakeReq]:
    """Plays the arrivals and aborts; the requests in the order of `schedule.arrivals`."""
    pending, requests = list(schedule.arrivals), []
    watcher = Watcher(harness)
    for step in range(5000):
        while pending and pending[0].at_step <= step:
            arrival = pending.pop(0)
            requests.append(harness.add(arrival.prompt, max_tokens=arrival.max_tokens))
        for req, arrival in zip(requests, schedule.arrivals, strict=False):
            if arrival.abort_at == step:
                harness.scheduler.abort(req.req_id)
        if harness.scheduler.is_finished():
            if not pending:
                break
            continue
        harness.step()
        if check:
            watcher.check()
    else:
        raise AssertionError("the schedule did not end")
    assert harness.pool.num_free == harness.pool.num_pages
    assert not harness.scheduler.running
    assert all(harness.pool.num_owners(page) == 0 for page in range(harness.pool.num_pages))
    return requests


class Watcher:
    """Checks after every step what must always hold of pages, blocks, tokens and stored KV."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.seen: dict[int, tuple[NDArray[np.int64], NDArray[np.bool_], int]] = {}

    def check(self) -> None:
        """All invariants, over all requests."""
        self.check_pages()
        for req in self.harness.scheduler.running:
            self.check_blocks(req)
            self.check_tokens(req)
            self.check_stored(req)

    def check_pages(self) -> None:
        """Pages are free or used, never lost; owners are the page tables that hold them."""
        pool = self.harness.pool
        owners = Counter(page for req in self.harness.scheduler.running for page in req.pages)
        for req in self.harness.scheduler.running:
            assert len(set(req.pages)) == len(req.pages)
        assert all(not req.pages for req in self.harness.scheduler.waiting)
        assert all(pool.num_owners(page) == owners[page] for page in range(pool.num_pages))
        assert pool.num_free == pool.num_pages - len(owners)

    def check_blocks(self, req: Any) -> None:
        """Statuses follow (TO_CACHE)* (ACTIVE)*, the window is contiguous and no wider than its slots."""
        statuses = [block.status for block in req.window]
        assert statuses == sorted(statuses, key=lambda status: status is BlockStatus.ACTIVE)
        assert len(req.window) <= req.rules.window_slots
        assert [block.index for block in req.window] == [
            req.num_committed + offset for offset in range(len(req.window))
        ]
        for block in req.window:
            masked = int((~req.filled[block.start : block.end]).sum())
            assert block.num_masks == masked
            assert block.status is BlockStatus.ACTIVE or masked == 0

    def check_tokens(self, req: Any) -> None:
        """What was filled stays as it is, the prompt always; counters only grow."""
        before = self.seen.get(req.req_id)
        assert req.tokens[: req.num_prompt].tolist() == list(req.prompt_copy)
        if before is not None:
            tokens, filled, num_committed = before
            assert (req.tokens[filled] == tokens[filled]).all()
            assert (req.filled | ~filled).all()
            assert req.num_committed >= num_committed
        assert MASK_ID not in req.tokens[req.num_prompt :][req.filled[req.num_prompt :]]
        self.seen[req.req_id] = (req.tokens.copy(), req.filled.copy(), req.num_committed)

    def check_stored(self, req: Any) -> None:
        """Every position that later rows read from pages holds KV of exactly the present prefix."""
        end = req.stored_end
        assert end <= req.final_end
        assert req.filled[:end].all()
        model, size = self.harness.runner.model, self.harness.config.page_size
        places = np.arange(end)
        slots = np.asarray(req.pages, np.int64)[places // size] * size + places % size
        tokens = req.tokens[:end]
        first, _ = two_layers(tokens, places, req.visible_ends(0, end).clip(max=max(end, 0)), 0)
        assert (model.own[slots] == token_digests(tokens, places)).all()
        assert (model.first[slots] == first).all()
