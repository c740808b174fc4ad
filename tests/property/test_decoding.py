"""What must hold of any decoding: relations between runs, and equality with full recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diffulex.engine.block import BlockStatus
from tests.property.schedules import EOS_IDS, MASK_ID, VOCAB, Schedule, run_schedule, schedules
from tests.support.checkpoints import write_random_sdar, write_stub
from tests.support.engines import Harness, Twist
from tests.support.full_forward import block_causal_ends, full_logits
from tests.support.real_engines import greedy, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diffulex import Diffulex
    from diffulex.mixin.multi_block.batch import BlockBatch
    from diffulex.mixin.multi_block.model_runner import Decisions


def share(part: float) -> Callable[[Any], Any]:
    """So much of the profile's number of examples, for tests that take longer."""
    return settings(max_examples=max(int(settings.default.max_examples * part), 8))


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stub")
    return str(write_stub(folder, VOCAB, mask_id=MASK_ID, eos_ids=EOS_IDS))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    return write_random_sdar(folder, VOCAB, mask_id=MASK_ID, eos_ids=EOS_IDS, scale=0.8, seed=3)


@pytest.fixture(autouse=True)
def restore_twist() -> Iterator[None]:
    yield
    Twist.shift, Twist.always_force, Twist.sharpness, Twist.table = False, False, 1.0, None


def harness_for(schedule: Schedule, stub: str, **changes: Any) -> Harness:
    Twist.shift, Twist.always_force = schedule.shift, schedule.always_force
    Twist.sharpness = schedule.sharpness
    return Harness(model=stub, **schedule.settings(**changes))


def play(schedule: Schedule, stub: str, **changes: Any) -> list[Any]:
    return run_schedule(harness_for(schedule, stub, **changes), schedule, check=False)


def outcome(req: Any) -> tuple[list[int], str]:
    return req.output_ids(), req.completion_reason


# Relations between runs ----------------------------------------------------------------------------------


@share(0.5)
@given(schedule=schedules(aborts=False))
def test_a_second_block_that_opens_late_changes_forwards_but_no_token(schedule: Schedule, stub: str) -> None:
    ample = {"num_pages": 400, "enable_prefix_caching": False}
    plain = play(replace(schedule, buffer_size=1), stub, overlap_store=False, **ample)
    overlapped = play(replace(schedule, buffer_size=1), stub, **ample)
    double = play(replace(schedule, buffer_size=2, add=1.0), stub, **ample)
    for one, quick, two in zip(plain, overlapped, double, strict=True):
        assert outcome(one) == outcome(quick) == outcome(two)
        assert one.nfe.denoise == quick.nfe.denoise == two.nfe.denoise
        assert two.nfe.total == quick.nfe.total <= one.nfe.total


@share(0.5)
@given(schedule=schedules(aborts=False))
def test_with_nothing_confident_each_block_that_may_be_forced_fills_one_position(
    schedule: Schedule, stub: str
) -> None:
    harness = harness_for(replace(schedule, accept=1.0), stub)
    for arrival in schedule.arrivals:
        harness.add(arrival.prompt, max_tokens=arrival.max_tokens)
    while not harness.scheduler.is_finished():
        wanted = {}
        plan_of = {req.req_id: req for req in (*harness.scheduler.running, *harness.scheduler.waiting)}
        before = {req_id: len(harness.accepted[req_id]) for req_id in plan_of}
        for req_id, req in plan_of.items():
            semi = schedule.semi
            left = [1.0, *(block.progress for block in req.window[:-1])]
            wanted[req_id] = sum(
                block.num_masks > 0 and (schedule.always_force or progress >= semi)
                for block, progress in zip(req.window, left, strict=True)
            )
        harness.step()
        for req_id, steps in harness.accepted.items():
            if len(steps) > before.get(req_id, len(steps)):
                assert len(steps[-1]) == wanted[req_id]


@share(0.5)
@given(schedule=schedules(aborts=False))
def test_with_threshold_zero_every_open_position_is_filled_in_its_first_forward(
    schedule: Schedule, stub: str
) -> None:
    harness = harness_for(replace(schedule, accept=0.0), stub)
    for arrival in schedule.arrivals:
        harness.add(arrival.prompt, max_tokens=arrival.max_tokens)
    while not harness.scheduler.is_finished():
        harness.step()
        for span in harness.plans[-1].spans:
            if span.samples:
                assert span.req.filled[span.start : span.end].all()


@given(num_blocks=st.integers(1, 9), num_prompt_blocks=st.integers(1, 6), size=st.sampled_from([4, 8]))
def test_with_threshold_zero_single_blocks_give_a_block_a_forward(
    num_blocks: int, num_prompt_blocks: int, size: int, stub: str
) -> None:
    harness = Harness(
        model=stub, block_size=size, page_size=8, buffer_size=1, accept_threshold=0.0, num_pages=64,
        max_model_len=200, max_num_batched_tokens=200,
    )  # fmt: skip
    req = harness.add([5] * (num_prompt_blocks * size), max_tokens=num_blocks * size, ignore_eos=True)
    harness.run()
    assert (req.nfe.total, len(req.output_ids()) / req.nfe.total) == (num_blocks, size)


def tables(draw: st.DrawFn) -> torch.Tensor:
    """Logits that depend on the position alone."""
    seed = draw(st.integers(0, 2**31))
    spread = draw(st.sampled_from([1.0, 3.0, 6.0]))
    return torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


@share(0.5)
@given(data=st.data(), buffer_size=st.integers(1, 4), num_prompt=st.integers(1, 13))
def test_a_higher_threshold_never_saves_forwards_when_logits_are_fixed(
    data: st.DataObject, buffer_size: int, num_prompt: int, stub: str
) -> None:
    Twist.table = data.draw(st.composite(tables)())
    Twist.always_force = data.draw(st.booleans())
    thresholds = sorted(data.draw(st.lists(st.floats(0, 1), min_size=2, max_size=4)))
    add, semi = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), data.draw(st.sampled_from([0.5, 0.9, 1.0]))
    passes, outputs = [], []
    for accept in thresholds:
        harness = Harness(
            model=stub, block_size=4, page_size=8, buffer_size=buffer_size, num_pages=64, max_model_len=200,
            max_num_batched_tokens=200, accept_threshold=accept, add_block_threshold=add,
            semi_complete_threshold=semi,
        )  # fmt: skip
        req = harness.add([5] * num_prompt, max_tokens=30)
        harness.run()
        passes.append(req.nfe.denoise)
        outputs.append(req.output_ids())
    assert passes == sorted(passes)
    assert all(output == outputs[0] for output in outputs)


@share(0.5)
@given(schedule=schedules(aborts=False))
def test_stopping_early_saves_forwards_and_changes_no_token(schedule: Schedule, stub: str) -> None:
    ample = {"num_pages": 400, "enable_prefix_caching": False}
    early = play(schedule, stub, early_eos_stop=True, **ample)
    late = play(schedule, stub, early_eos_stop=False, **ample)
    for one, other in zip(early, late, strict=True):
        assert outcome(one) == outcome(other)
        assert one.nfe.total <= other.nfe.total


@share(0.5)
@given(schedule=schedules(aborts=False), data=st.data())
def test_a_shorter_answer_is_the_beginning_of_a_longer_one(
    schedule: Schedule, stub: str, data: st.DataObject
) -> None:
    size = schedule.block_size
    arrivals = [replace(one, max_tokens=40) for one in schedule.arrivals]
    ends = [-(-len(one.prompt) // size) * size for one in arrivals]
    short = [
        replace(one, max_tokens=end - len(one.prompt) + size * data.draw(st.integers(1, 3)))
        for one, end in zip(arrivals, ends, strict=True)
    ]
    long_run = play(replace(schedule, arrivals=arrivals), stub, num_pages=400)
    short_run = play(replace(schedule, arrivals=short), stub, num_pages=400)
    for one, other in zip(short_run, long_run, strict=True):
        assert one.output_ids() == other.output_ids()[: len(one.output_ids())]


@share(0.5)
@given(schedule=schedules())
def test_counters_add_up(schedule: Schedule, stub: str) -> None:
    harness = harness_for(schedule, stub)
    for req in run_schedule(harness, schedule, check=False):
        spans = [span for plan in harness.plans for span in plan.spans if span.req is req]
        assert req.nfe.total == len(spans)
        assert req.num_forward_tokens == sum(span.num_rows for span in spans)
        assert req.num_decoded == sum(len(step) for step in harness.accepted[req.req_id])
        # Masks of the blocks that opened, plus stores, rebuilds and a piece for each: progress is certain.
        assert req.nfe.denoise <= len(req.tokens) - req.num_prompt
        assert all(block.status is not BlockStatus.DUMMY for block in req.window)


@given(num_pages=st.integers(1, 5), page_size=st.sampled_from([4, 8]), shift=st.booleans(), data=st.data())
def test_a_prompt_of_whole_pages_served_from_the_cache_gives_the_same_answer(
    num_pages: int, page_size: int, shift: bool, data: st.DataObject, stub: str
) -> None:
    Twist.shift = shift
    tokens = st.lists(
        st.integers(3, VOCAB - 1), min_size=num_pages * page_size, max_size=num_pages * page_size
    )
    prompt = data.draw(tokens)
    harness = Harness(
        model=stub, block_size=4, page_size=page_size, buffer_size=2, num_pages=64, max_model_len=200,
        max_num_batched_tokens=200,
    )  # fmt: skip
    requests = []
    for _ in range(2):
        requests.append(harness.add(prompt, max_tokens=12))
        harness.run()
    first, second = requests
    assert second.num_cached_tokens == (num_pages - shift) * page_size
    assert harness.accepted[0] == harness.accepted[1]
    assert outcome(first) == outcome(second)


@share(0.5)
@given(schedule=schedules(aborts=False), data=st.data())
def test_draws_depend_neither_on_batch_mates_nor_on_cache_pages_or_order(
    schedule: Schedule, stub: str, data: st.DataObject
) -> None:
    heat = data.draw(st.sampled_from([0.3, 0.8, 1.5]))
    cuts = {"top_p": data.draw(st.sampled_from([0.7, 1.0])), "top_k": data.draw(st.sampled_from([0, 4]))}

    def drawn(order: list[int], **changes: Any) -> dict[int, tuple[list[int], str]]:
        harness = harness_for(schedule, stub, **changes)
        for index in order:
            arrival = schedule.arrivals[index]
            params = {"temperature": heat, "seed": index, **cuts}
            harness.add(arrival.prompt, max_tokens=arrival.max_tokens, **params)
        harness.run()
        return {index: outcome(req) for index, req in zip(order, harness.requests, strict=True)}

    places = list(range(len(schedule.arrivals)))
    alone = {}
    for index in places:
        alone |= drawn([index], num_pages=400)
    order = data.draw(st.permutations(places))
    assert drawn(list(order), enable_prefix_caching=not schedule.prefix_caching) == alone


# The real network ----------------------------------------------------------------------------------------


class Recomputed:
    """Compares the logits of every forward with those of a forward over the whole sequence."""

    def __init__(self, engine: Diffulex) -> None:
        self.engine = engine
        self.num_rows = 0
        self.worst = 0.0
        self._spans: Any = ()
        self._prepare, self._sample = engine.runner.prepare, engine.runner.sample
        engine.runner.prepare = self.prepare  # type: ignore[method-assign]
        engine.runner.sample = self.sample  # type: ignore[method-assign]

    def prepare(self, spans: Any) -> BlockBatch:
        self._spans = spans
        return self._prepare(spans)

    def sample(self, hidden: torch.Tensor, batch: BlockBatch) -> Decisions:
        model, size = self.engine.runner.model, self.engine.config.block_size
        logits = model.compute_logits(hidden).split([span.num_rows for span in self._spans])
        for span, rows in zip(self._spans, logits, strict=True):
            tokens = span.req.tokens[: span.end].tolist()
            whole = full_logits(model, tokens, block_causal_ends(span.end, size))
            self.worst = max(self.worst, (whole[span.start :] - rows).abs().max().item())
            self.num_rows += span.num_rows
        return self._sample(hidden, batch)


@share(0.2)
@given(schedule=schedules(aborts=False))
def test_incremental_windows_have_the_logits_of_a_full_recomputation(schedule: Schedule, net: Path) -> None:
    with make_engine(net, **schedule.settings()) as engine:
        watch = Recomputed(engine)
        outputs = engine.generate(
            [one.prompt for one in schedule.arrivals], [greedy(one.max_tokens) for one in schedule.arrivals]
        ).trajectories
        assert watch.num_rows == sum(output.num_forward_tokens for output in outputs)
        # float32: one rounding order in pieces, another in one go; logits are of order ten.
        assert watch.worst < 1e-4


@share(0.2)
@given(schedule=schedules(aborts=False), data=st.data())
def test_the_real_network_answers_alike_in_any_batch_pages_and_order(
    schedule: Schedule, net: Path, data: st.DataObject
) -> None:
    plain = schedule.settings(num_pages=400, enable_prefix_caching=False, max_num_reqs=1)
    alone = []
    with make_engine(net, **plain) as engine:
        for one in schedule.arrivals:
            (output,) = engine.generate([one.prompt], greedy(one.max_tokens)).trajectories
            alone.append((output.token_ids, output.completion_reason, output.nfe.denoise))
    order = data.draw(st.permutations(range(len(schedule.arrivals))))
    with make_engine(net, **schedule.settings()) as engine:
        engine.scheduler.max_num_batched_tokens = data.draw(st.sampled_from([16, 40, 400]))
        got: dict[int, Any] = {}
        index_of: dict[int, int] = {}
        for index in order:
            one = schedule.arrivals[index]
            index_of[engine.add_request(one.prompt, greedy(one.max_tokens))] = index
            for _ in range(data.draw(st.integers(0, 2))):
                got |= {output.req_id: output for output in engine.step().finished}
        while not engine.is_finished():
            got |= {output.req_id: output for output in engine.step().finished}
    for req_id, output in got.items():
        wanted = alone[index_of[req_id]]
        assert (output.token_ids, output.completion_reason, output.nfe.denoise) == wanted


@share(0.3)
@given(data=st.data(), length=st.integers(8, 40), block_size=st.sampled_from([4, 8]))
def test_no_token_changes_the_logits_of_an_earlier_block(
    data: st.DataObject, length: int, block_size: int, net: Path, network: Any
) -> None:
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
    place = data.draw(st.integers(0, length - 1))
    other = data.draw(st.integers(0, VOCAB - 1))
    assume(other != tokens[place])
    ends = block_causal_ends(length, block_size)
    before = full_logits(network, tokens, ends)
    changed = [*tokens[:place], other, *tokens[place + 1 :]]
    after = full_logits(network, changed, ends)
    border = place // block_size * block_size
    assert torch.equal(before[:border], after[:border])
    assert not torch.equal(before[border:], after[border:])


@pytest.fixture(scope="module")
def network(net: Path) -> Any:
    with make_engine(net) as engine:
        yield engine.runner.model
