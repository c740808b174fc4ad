"""Engines with fake models: `hash_block` (answers depend on exactly what is visible) and `table` (fixed
answers).

Both are registered as strategies, so the real configuration, scheduler, page pool, request and sampler run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.config import Config
from diffulex.engine.kv_cache_manager import AutoKVCacheManager, MultiBlockKVCacheManagerTemplate
from diffulex.engine.model_runner import AutoModelRunner, MultiBlockModelRunnerTemplate
from diffulex.engine.request import AutoReq, MultiBlockReqTemplate
from diffulex.engine.scheduler import AutoScheduler, MultiBlockSchedulerTemplate
from diffulex.sampling_params import SamplingParams
from diffulex.strategy.multi_bd.attention.metadata import SLOT
from tests.support.hash_model import HashModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from diffulex.engine.page_pool import PagePool
    from diffulex.engine.plan import StepPlan
    from diffulex.engine.rules import DecodeRules


#: More than any test needs; a loop that never ends fails instead of filling the memory.
MAX_STEPS = 10_000


class TableModel:
    """Answers from a table of logits by position."""

    num_layers = 1
    num_kv_heads = 1
    head_dim = 1

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]

    def attention_layers(self) -> list[object]:
        return []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return positions.clone()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[hidden]


class Twist:
    """What the next engines of a fake strategy use; set by the tests."""

    shift: ClassVar[bool] = False
    always_force: ClassVar[bool] = False
    sharpness: ClassVar[float] = 1.0
    table: ClassVar[torch.Tensor | None] = None


class FakeReq(MultiBlockReqTemplate):
    prompt_copy: tuple[int, ...] = ()

    @classmethod
    def make_rules(cls, config: Config | None) -> DecodeRules:
        rules = super().make_rules(config)
        return replace(rules, shift_logits=Twist.shift, always_force=Twist.always_force)


class FakeRunner(MultiBlockModelRunnerTemplate):
    attn_metadata = SLOT

    def load_model(self) -> Any:
        self.shift_logits = Twist.shift
        if Twist.table is not None:
            return TableModel(Twist.table)
        num_slots = self.config.num_pages * self.config.page_size
        vocab = self.config.checkpoint.vocab_size
        return HashModel(vocab, num_slots, salt=self.config.seed, sharpness=Twist.sharpness)


class FakeScheduler(MultiBlockSchedulerTemplate):
    pass


class FakeManager(MultiBlockKVCacheManagerTemplate):
    pass


def register() -> None:
    """Files the fake strategy once."""
    if "fake" not in AutoReq:
        AutoReq.register("fake")(FakeReq)
        AutoModelRunner.register("fake")(FakeRunner)
        AutoScheduler.register("fake")(FakeScheduler)
        AutoKVCacheManager.register("fake")(FakeManager)


register()


class Harness:
    """Scheduler and runner without tokenizer and text: quick to make, open to inspection."""

    def __init__(self, **settings: Any) -> None:
        self.config = Config(model_name="sdar", decoding_strategy="fake", **settings)
        self.runner = FakeRunner(self.config, 0, [])
        self.scheduler = FakeScheduler(self.config)
        self.requests: list[FakeReq] = []
        self.plans: list[StepPlan] = []
        self.accepted: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def pool(self) -> PagePool:
        return self.scheduler.kv_cache_manager.pool

    def add(self, prompt: Sequence[int], **params: Any) -> FakeReq:
        req = FakeReq(prompt, SamplingParams(**{"temperature": 0.0, **params}), self.config)
        req.req_id, req.prompt_copy = len(self.requests), tuple(prompt)
        self.scheduler.add(req)
        self.requests.append(req)
        self.accepted[req.req_id] = []
        return req

    def step(self) -> list[MultiBlockReqTemplate]:
        if len(self.plans) >= MAX_STEPS:
            raise AssertionError(f"{len(self.requests)} requests did not end within {MAX_STEPS} steps")
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if not plan.spans:
            return []
        result = self.runner.run(plan)
        for index, span in enumerate(plan.spans):
            rows = slice(result.row_offsets[index], result.row_offsets[index + 1])
            taken = result.accepted[rows]
            writes = zip(result.positions[rows][taken], result.tokens[rows][taken], strict=True)
            if span.samples:
                self.accepted[span.req.req_id].append(sorted((int(p), int(t)) for p, t in writes))
        return self.scheduler.postprocess(plan, result)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.scheduler.is_finished():
                return
            self.step()
        raise AssertionError(f"{len(self.requests)} requests did not end within {max_steps} steps")
