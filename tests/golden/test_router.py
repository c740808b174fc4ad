"""Choices of experts and their weights in every expert layer, as the families' original code made them.

Weights are compared by expert id: the order of a row's choices is no part of the meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from diffulex.model.catalog import AutoModel
from diffulex.moe.router import Router
from tests.golden.cases import DATA, golden_root
from tests.golden.test_forward import CHECKS, Check
from tests.support.paged import PagedRun, Part

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.moe.router import Routing

#: float32; weights of one row add up to the scaling factor, 2.5 in the published models.
TOLERANCE = 1e-5
_NAME = re.compile(r"router_topk_ids_(\w+)_layer(\d+)")


@dataclass(frozen=True)
class RouterCheck:
    """The expert layer `layer` in the forward of `check`."""

    check: Check
    layer: int

    def __str__(self) -> str:
        return f"{self.check}/layer{self.layer}"

    def tensor(self, what: str) -> torch.Tensor:
        return tensors_of(self.check.case)[f"router_topk_{what}_{self.check.key}_layer{self.layer}"]


@lru_cache
def tensors_of(case: Path) -> dict[str, torch.Tensor]:
    return load_file(case / "forward.safetensors")


def router_checks() -> list[RouterCheck]:
    found = []
    for check in CHECKS:
        matches = (_NAME.fullmatch(name) for name in tensors_of(check.case))
        layers = sorted(int(match[2]) for match in matches if match and match[1] == check.key)
        found += [RouterCheck(check, layer) for layer in layers]
    return found


@lru_cache
def choices(check: Check) -> dict[int, list[Routing]]:
    """What the routers of a whole forward chose: decoder layer -> one entry a row of the batch."""
    model = check.model()
    found: dict[int, list[Routing]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, _args, chosen, at=layer_id: found.setdefault(at, []).append(chosen)
        )
        for layer_id, layer in enumerate(model.layers)
        for module in layer.modules()
        if isinstance(module, Router)
    ]
    for row in range(len(check.input_ids)):
        PagedRun(model).logits([Part(0, check.input_ids[row], check.ends(), positions=check.positions(row))])
    for hook in hooks:
        hook.remove()
    return found


ROUTER_CHECKS = router_checks()


def test_the_bundled_checks_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(ROUTER_CHECKS)} router checks under {golden_root()}")
    assert len(ROUTER_CHECKS) == 17
    assert {check.check.case.parent.name for check in ROUTER_CHECKS} == {"llada2_mini", "llada2_mini_dmax"}


@pytest.mark.parametrize("check", ROUTER_CHECKS, ids=str)
def test_rows_go_to_the_golden_experts_with_the_golden_weights(check: RouterCheck) -> None:
    family = check.check.case.parent.name
    if family not in AutoModel:
        pytest.skip(f"family not supported yet: {family}, golden check {check} was not run")
    ids, weights = check.tensor("ids"), check.tensor("weights")
    chosen = choices(check.check)[check.layer]
    assert len(chosen) == len(ids)
    for row, routing in enumerate(chosen):
        wanted, order = ids[row].sort(dim=-1)
        got, own_order = routing.expert_ids.sort(dim=-1)
        assert torch.equal(got, wanted), f"{check}, row {row}: other experts"
        expected = weights[row].gather(-1, order)
        worst = float((routing.weights.gather(-1, own_order) - expected).abs().max())
        assert worst <= TOLERANCE, f"{check}, row {row}: weights differ by {worst}"
