"""Owns model, KV cache and sampler of one rank, and turns a `StepPlan` into a `StepResult`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from diffulex.attention.cache_layout import make_layout
from diffulex.attention.metadata import MetadataSlot, set_fetch_fn_for_attn_metadata
from diffulex.distributed.collectives import all_minimum
from diffulex.distributed.launch import start_group, stop_group
from diffulex.engine.memory import CacheShape, MemoryPlan, plan_memory
from diffulex.engine.plan import StepPlan, StepResult
from diffulex.logger import get_logger
from diffulex.mixin.multi_block.model_runner import Decisions, MultiBlockRunnerMixin
from diffulex.model.loader import load_model
from diffulex.moe.block import use_forms
from diffulex.profiling import Profiler
from diffulex.sampler.base import AutoSampler
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.utils.adapter_files import read_adapter
from diffulex.utils.device import free_memory, resolve_device, resolve_dtype
from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Event

    from torch import Tensor

    from diffulex.config import Config
    from diffulex.engine.worker import Workers
    from diffulex.mixin.multi_block.batch import BlockBatch
    from diffulex.model.decoder import DiffusionLM

logger = get_logger(__name__)


class ModelRunnerBase:
    """Loads the model, makes the KV cache, binds the attention metadata. Made by the engine, one a rank.

    A strategy names its metadata either in `attn_metadata` or by calling `init_attn_metadata_fn` before this
    constructor; both only store functions.
    """

    #: The processes of the other ranks; only rank 0 has them.
    workers: Workers | None = None
    #: Metadata object of the strategy, bound before the model is built.
    attn_metadata: ClassVar[MetadataSlot[Any] | None] = None
    set_attn_metadata: Callable[..., None] | None = None
    reset_attn_metadata: Callable[[], None] | None = None
    boundary_rows: Tensor | None = None

    def __init__(self, config: Config, rank: int, event: Event | list[Event]) -> None:
        self.config = config
        self.rank = rank
        self.event = event
        self.device = resolve_device(config, rank)
        self.dtype = resolve_dtype(config)
        self.profiler = Profiler(config.profiler_config, rank)
        if self.set_attn_metadata is None:
            if self.attn_metadata is None:
                raise TypeError(
                    f"{type(self).__name__} names no attention metadata; set attn_metadata or call "
                    "init_attn_metadata_fn before super().__init__"
                )
            slot = self.attn_metadata
            set_fetch_fn_for_attn_metadata(slot.fetch)
            self.init_attn_metadata_fn(slot.set, slot.reset, slot.fetch)
        self.parallel = start_group(config, rank)
        self.shift_logits = MODEL_DEFAULTS[config.model_name].shift_logits
        try:
            self.model = self.load_model()
            self.sampler = AutoSampler.get(config.sampling_mode)()
            self.memory_plan = self.allocate_cache()
        except BaseException:
            stop_group(self.parallel)  # or this process could never join a group again
            raise
        self.max_logits_rows = self.memory_plan.max_logits_rows
        self.profiler.start()

    def init_attn_metadata_fn(
        self, set_fn: Callable[..., None], reset_fn: Callable[[], None], fetch_fn: Callable[[], Any]
    ) -> None:
        """Stores how the metadata of a forward is set, reset and fetched."""
        self.set_attn_metadata = set_fn
        self.reset_attn_metadata = reset_fn
        self.fetch_attn_metadata = fetch_fn

    def load_model(self) -> DiffusionLM:
        """The model of the checkpoint, on the device, in evaluation mode, with its adapter if any."""
        config = self.config
        model = load_model(
            config,
            self.device,
            self.dtype,
            show_progress=self.rank == 0 and sys.stderr.isatty(),
            parallel=self.parallel,
            adapter=read_adapter(config.lora_path) if config.use_lora else None,
            merge_adapter=config.pre_merge_lora,
        )
        use_forms(model, config.moe_gemm_impl, config.moe_dispatcher_backend)
        return model

    def allocate_cache(self) -> MemoryPlan:
        """Plans the memory and gives each attention layer its keys and values.

        The pages are not cleared: a slot is only read after it was written.
        """
        model = self.model
        layers = model.attention_layers()
        shape = CacheShape(tuple(layer.kv_shape for layer in layers), self.dtype.itemsize)
        available = free_memory(self.device)
        if self.device.type == "cpu":
            available //= self.parallel.size  # all ranks share the main memory
        available = all_minimum(available, self.parallel)
        plan = plan_memory(self.config, shape, model.vocab_size, available)
        layout = make_layout(self.config.kv_cache_layout, self.config.k_cache_hdim_split_factor_x)
        for layer in layers:
            layer.k_cache, layer.v_cache = layout.allocate(
                plan.num_pages, self.config.page_size, layer.kv_shape, self.dtype, self.device
            )
        return plan

    def exit(self) -> None:
        """Ends profiling and lets go of model and cache."""
        self.profiler.stop()
        del self.model
        self.boundary_rows = None
        if self.workers is not None:
            self.workers.stop()
        stop_group(self.parallel)


class MultiBlockModelRunnerTemplate(MultiBlockRunnerMixin, ModelRunnerBase):  # type: ignore[misc]
    """Runner of block strategies: one ragged forward a step.

    The mixin states what it needs of a model as a protocol; the base fills it with a `DiffusionLM`.
    """

    @torch.inference_mode()
    def follow(self, batch: BlockBatch) -> None:
        """What the other ranks do while rank 0 runs `batch`: the same forward, the same logits."""
        self.sample(self.forward(batch), batch)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Forwards and samples `plan`; requests with logits that are not finite are reported, not raised."""
        clock = [time.perf_counter()]
        with self.profiler.span("prepare"):
            batch = self.prepare(plan.spans)
            if self.workers is not None:
                self.workers.send(batch)
        clock.append(time.perf_counter())
        try:
            with self.profiler.span("forward"):
                hidden = self.forward(batch)
            clock.append(time.perf_counter())
            with self.profiler.span("sample"):
                decisions = self.sample(hidden, batch)
        except RuntimeError as error:
            if self.workers is None:
                raise
            raise self.workers.failure(error) from error
        clock.append(time.perf_counter())
        self.profiler.step()
        parts = {name: clock[i + 1] - clock[i] for i, name in enumerate(("prepare", "forward", "sample"))}
        return self._collect(batch, decisions, parts)

    def _collect(self, batch: BlockBatch, decisions: Decisions, times: dict[str, float]) -> StepResult:
        failed: dict[int, str] = {}
        bad = np.flatnonzero(~np.isfinite(decisions.confidences))
        if len(bad):
            spans = np.searchsorted(batch.row_offsets, bad, side="right") - 1
            for span in np.unique(spans):
                first = int(batch.sample_positions[bad[spans == span][0]])
                failed[int(span)] = f"the logits at position {first} are not finite (NaN or infinity)"
                decisions.accepted[batch.row_offsets[span] : batch.row_offsets[span + 1]] = False
        return StepResult(
            row_offsets=batch.row_offsets,
            positions=batch.sample_positions,
            tokens=decisions.tokens,
            confidences=decisions.confidences,
            accepted=decisions.accepted,
            failed=failed,
            times=times,
        )


class _ModelRunnerRegistry(Registry[ModelRunnerBase]):
    """Model runners by decoding strategy."""


AutoModelRunner: _ModelRunnerRegistry = _ModelRunnerRegistry("model runner", ModelRunnerBase)
