"""Fits a PEFT adapter to a model: its names against the model's weights, before any weight is read.

Called by `loader.py`. An adapter speaks the names of the checkpoint, and so do the weight slots: no table of
other names stands between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.layer.lora import LoraPair
from diffulex.utils.adapter_files import AdapterError
from diffulex.utils.weight_files import FLOAT_TYPES, iter_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from diffulex.layer.weights import WeightSlot
    from diffulex.utils.adapter_files import AdapterFacts


def read_pairs(
    adapter: AdapterFacts, slots: Mapping[str, WeightSlot], *, beside: bool
) -> dict[str, LoraPair]:
    """The adapter of each weight that has one, by the weight's name.

    Args:
        adapter: what its files say.
        slots: the model's weights by their names in the checkpoint.
        beside: the adapter is to be computed beside the weights, which not every layer can.

    Raises:
        AdapterError: the adapter was made for another model or is not complete. All tensors that fit no
            module, all modules that lack theirs, and all shapes that differ stand in the one message.
    """
    _compare(adapter, slots, beside=beside)
    tensors = {name: tensor.float() for name, tensor in iter_tensors((adapter.weight_file,))}
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise AdapterError(
            f"{len(broken)} tensors in {adapter.weight_file} hold values that are not finite: "
            f"{', '.join(broken)}; fetch the file again"
        )
    return {
        f"{module}.weight": _pair(adapter, module, tensors[names["A"]], tensors[names["B"]])
        for module, names in adapter.tensors.items()
    }


def _pair(adapter: AdapterFacts, module: str, a: Tensor, b: Tensor) -> LoraPair:
    return LoraPair(a, b, adapter.scale_of(module))


def _compare(adapter: AdapterFacts, slots: Mapping[str, WeightSlot], *, beside: bool) -> None:
    """Everything that does not fit, in one error."""
    linear = {
        name.removesuffix(".weight"): slot
        for name, slot in slots.items()
        if name.endswith(".weight") and len(slot.shape) == 2
    }
    tensors, covers = adapter.tensors, adapter.targets.covers
    fitting = [module for module in tensors if module in linear]
    lacking = [] if adapter.targets.is_open else [m for m in linear if covers(m) and m not in tensors]
    findings = (
        (
            "tensors fit no linear layer of this model",
            [
                *adapter.strange,
                *(name for module in tensors if module not in linear for name in tensors[module].values()),
            ],
        ),
        ("modules are targets of the adapter and have no tensors", lacking),
        ("modules have tensors and are no targets", [m for m in fitting if not covers(m)]),
        ("modules have only one of lora_A and lora_B", [m for m in fitting if len(tensors[m]) == 1]),
        (
            "tensors are of another shape",
            [text for module in fitting for text in _misshapen(adapter, module, linear[module].shape)],
        ),
        (
            f"tensors are not stored as one of {', '.join(sorted(FLOAT_TYPES))}",
            [
                f"{name} is {adapter.headers[name].dtype}"
                for module in fitting
                for name in tensors[module].values()
                if adapter.headers[name].dtype not in FLOAT_TYPES
            ],
        ),
        (
            "modules take no adapter beside their weights (write pre_merge_lora=True)",
            [module for module in fitting if beside and not linear[module].takes_adapter],
        ),
    )
    parts = [f"{len(names)} {what}: {', '.join(names)}" for what, names in findings if names]
    if not fitting:
        parts.insert(0, "it changes no module of this model")
    if parts:
        made_for = f"; the adapter says it was made for {adapter.base!r}" if adapter.base else ""
        raise AdapterError(
            f"the adapter in {adapter.path} does not fit the model; {'; '.join(parts)}{made_for}; "
            "check lora_path and model"
        )


def _misshapen(adapter: AdapterFacts, module: str, shape: tuple[int, ...]) -> list[str]:
    rank, (num_rows, num_columns) = adapter.rank_of(module), shape
    expected = {"A": (rank, num_columns), "B": (num_rows, rank)}
    return [
        f"{name} is {list(adapter.headers[name].shape)}, must be {list(expected[side])}"
        for side, name in adapter.tensors[module].items()
        if adapter.headers[name].shape != expected[side]
    ]
