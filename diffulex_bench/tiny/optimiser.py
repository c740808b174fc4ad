"""Muon for the matrices inside the layers, AdamW for everything else, and the course of their rates."""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from diffulex_bench.tiny.recipe import Optimisation

# Coefficients of the quintic Newton-Schulz iteration of Muon (Keller Jordan, 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal; matrices of one shape are updated together."""

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float, decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        defaults = {"lr": rate, "momentum": momentum, "decay": decay}
        super().__init__([{"params": members} for members in groups.values()], defaults)

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:  # type: ignore[override]  # a closure is never used here
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            members: list[nn.Parameter] = group["params"]
            gradients = torch.stack([_gradient(matrix) for matrix in members])
            state = self.state[members[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            average: Tensor = state["momentum"]
            average.lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(average, group["momentum"]))
            num_rows, num_columns = members[0].shape
            scale = group["lr"] * max(1.0, num_rows / num_columns) ** 0.5
            weights: list[Tensor] = list(members)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(weights, list(update.to(weights[0].dtype).unbind()), alpha=-scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with singular values near one, ``[G, rows, columns]``.

    Works in bfloat16 on a CUDA device, in float32 elsewhere.
    """
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def make_optimisers(network: nn.Module, settings: Optimisation) -> list[torch.optim.Optimizer]:
    """Return the two optimisers; each group remembers its full rate as ``full_rate``."""
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in network.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, settings.matrix_rate, settings.matrix_momentum, settings.matrix_decay)
    is_fused = others[0].is_cuda
    adam = torch.optim.AdamW(
        others, lr=settings.other_rate, betas=settings.other_betas, weight_decay=0.0, fused=is_fused
    )
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["full_rate"] = group["lr"]
    return [muon, adam]


def rate_factor(settings: Optimisation, step: int, progress: float) -> float:
    """Return the factor on the full rates at a step, after ``progress`` (0 to 1) of the run."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    if progress <= settings.flat_until:
        return warmup
    share = min(1.0, (progress - settings.flat_until) / (1 - settings.flat_until))
    return warmup * (
        settings.final_factor + (1 - settings.final_factor) * 0.5 * (1 + math.cos(math.pi * share))
    )


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad
