"""Builds the model of a checkpoint and fills its weights, one tensor at a time.

Called by the model runner. Names, shapes and types are compared before the first weight is read.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from diffulex.config import ConfigError
from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.logger import get_logger
from diffulex.model.adapter import read_pairs
from diffulex.model.catalog import family_of
from diffulex.utils.checkpoint import CheckpointError, iter_weights, weight_headers
from diffulex.utils.weight_files import FLOAT_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from diffulex.layer.weights import WeightSlot
    from diffulex.model.decoder import DiffusionLM
    from diffulex.utils.adapter_files import AdapterFacts
    from diffulex.utils.checkpoint import CheckpointFacts, TensorHeader

logger = get_logger(__name__)


class LoadSettings(Protocol):
    """What loading needs of the configuration."""

    @property
    def model_name(self) -> str:
        """Which family to build."""
        ...

    @property
    def mask_token_id(self) -> int:
        """Must be an id of the model's vocabulary."""
        ...

    @property
    def checkpoint(self) -> CheckpointFacts:
        """Where the weights are."""
        ...


def outline(config: LoadSettings, parallel: ParallelState = SINGLE) -> DiffusionLM:
    """The network of `config.checkpoint` without memory for weights: shapes and names only."""
    family = family_of(config.model_name, config.checkpoint)
    names = weight_headers(config.checkpoint).keys()
    with torch.device("meta"):
        return family.from_facts(config.checkpoint, names, dtype=torch.float32, parallel=parallel)


def check_division(config: LoadSettings, size: int) -> None:
    """The model of `config.checkpoint` can be divided among `size` processes; no weight is read.

    Raises:
        ConfigError: heads or another width do not divide; names what and by how much.
        CheckpointError: the checkpoint is another family's or its config.json cannot be read.
    """
    try:
        outline(config, ParallelState(size))
    except CheckpointError:
        raise
    except ValueError as error:
        raise ConfigError([f"tensor_parallel_size={size} does not fit this model: {error}"]) from error


def load_model(
    config: LoadSettings,
    device: torch.device,
    dtype: torch.dtype,
    show_progress: bool = False,
    parallel: ParallelState = SINGLE,
    adapter: AdapterFacts | None = None,
    merge_adapter: bool = False,
) -> DiffusionLM:
    """The model of `config.checkpoint` on `device`, in evaluation mode, all weights filled and finite.

    With `parallel` it is this process's part of the model. An adapter is computed beside the weights of the
    checkpoint or, with `merge_adapter`, added to them in float32 before they are cast.

    Raises:
        AdapterError: the adapter does not fit the model; all names stand in the one message.
        CheckpointError: the checkpoint is another family's, damaged, holds values that are not finite, or
            lacks, misshapes or exceeds the model's tensors; all such names stand in the one message.
    """
    facts = config.checkpoint
    started = time.perf_counter()
    family = family_of(config.model_name, facts)
    headers = weight_headers(facts)
    with torch.device(device):
        model = family.from_facts(facts, headers.keys(), dtype=dtype, parallel=parallel)
    if not 0 <= config.mask_token_id < model.vocab_size:
        raise CheckpointError(
            f"mask_token_id ({config.mask_token_id}) must be below the vocabulary size ({model.vocab_size}) "
            f"of {facts.path}; set mask_token_id to the id of the checkpoint's mask token"
        )
    slots = model.weight_slots()
    unused = [name for name in headers if name not in slots and not model.ignores(name)]
    _compare(facts, slots, headers, unused)
    pairs = {} if adapter is None else read_pairs(adapter, slots, beside=not merge_adapter)
    merged = pairs if merge_adapter else {}
    num_bytes = sum(headers[name].num_bytes for name in slots)
    with torch.inference_mode(), _progress(num_bytes, show_progress) as advance:
        for name, tensor in iter_weights(facts):
            if name in slots:
                slots[name].load(merged[name].merged_into(tensor) if name in merged else tensor)
                _check_finite(name, slots[name].target, headers[name])
                advance(headers[name].num_bytes)
    if not merge_adapter:
        for name, pair in pairs.items():
            pair.attach(slots[name])
    seconds = time.perf_counter() - started
    size = num_bytes / 2**30
    logger.info("loaded %s from %s: %.3f GiB in %.1f s", config.model_name, facts.path, size, seconds)
    if adapter is not None:
        way = "merged into" if merge_adapter else "beside"
        logger.info("adapter %s: %s %d weights", adapter.path, way, len(pairs))
    return model.eval()


def _compare(
    facts: CheckpointFacts,
    slots: Mapping[str, WeightSlot],
    headers: Mapping[str, TensorHeader],
    unused: list[str],
) -> None:
    """Every name that is missing, left over, misshapen or of a type that cannot be read, in one error."""
    missing = [name for name in slots if name not in headers]
    both = [name for name in slots if name in headers]
    misshapen = [
        f"{name} is {list(headers[name].shape)}, must be {list(slots[name].shape)}"
        for name in both
        if headers[name].shape != slots[name].shape
    ]
    unreadable = [
        f"{name} is {headers[name].dtype}" for name in both if headers[name].dtype not in FLOAT_TYPES
    ]
    parts = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (
            ("missing", missing),
            ("unused", unused),
            ("misshapen", misshapen),
            (f"not stored as one of {', '.join(sorted(FLOAT_TYPES))}", unreadable),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"the weights in {facts.path} do not fit its config.json; {'; '.join(parts)}; "
            "check that the files belong together and that model_name is right"
        )


def _check_finite(name: str, filled: Tensor, header: TensorHeader) -> None:
    """A sum in float32 is finite exactly when all values are, or overflows; only then look closer."""
    if bool(torch.isfinite(filled.sum(dtype=torch.float32))):
        return
    num_bad = int((~torch.isfinite(filled)).sum())
    if num_bad:
        raise CheckpointError(
            f"{name} in {header.file} holds {num_bad} values that are not finite as {filled.dtype}; "
            "fetch the file again or use a wider dtype"
        )


@contextmanager
def _progress(num_bytes: int, show: bool) -> Iterator[Callable[[float], None]]:
    """A function that reports how many more bytes are loaded; with `show` a bar on standard error."""
    if not show:
        yield lambda _: None
        return
    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("loading weights", total=num_bytes)
        yield lambda more: bar.advance(task, more)
