"""DiffusionGemma's canvas sampler: one denoising step, when a canvas is done, and where its noise comes from.

A canvas begins as random ids. In each step the positions of low entropy take a drawn id and all others a new
random one; every position is judged again in every step. The result is the argmax of the last step.

Axes: C positions of a canvas, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CanvasRules:
    """How a canvas is denoised.

    Attributes:
        max_denoising_steps: steps after which a canvas is done in any case, at least 1.
        t_min, t_max: the temperature falls from `t_max` in the first step towards `t_min`, which it never
            reaches.
        entropy_bound: nats that the positions accepted in one step may have together, the least certain of
            them not counted.
        stability_threshold: number of steps before that must have had the same argmax; 0 asks for none.
        confidence_threshold: nats; the mean entropy of a canvas that is done lies below it.

    Raises:
        ValueError: names the value that is out of its range.
    """

    max_denoising_steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    stability_threshold: int
    confidence_threshold: float

    def __post_init__(self) -> None:
        ranges = (
            ("max_denoising_steps", self.max_denoising_steps >= 1, "at least 1"),
            ("t_min", self.t_min >= 0, "at least 0"),
            ("t_max", self.t_max > self.t_min, f"above t_min ({self.t_min})"),
            ("entropy_bound", self.entropy_bound > 0, "above 0"),
            ("stability_threshold", self.stability_threshold >= 0, "at least 0"),
            ("confidence_threshold", self.confidence_threshold > 0, "above 0"),
        )
        for name, holds, rule in ranges:
            if not holds:
                raise ValueError(f"{name} must be {rule}, it is {getattr(self, name)}; correct the value")

    def temperature(self, steps_left: int) -> float:
        """Temperature of the step that has `steps_left` steps to go, itself included."""
        return self.t_min + (self.t_max - self.t_min) * (steps_left / self.max_denoising_steps)


class NoiseSource(Protocol):
    """Everything random about the canvases of one request, asked for in the order of the steps."""

    def initial_canvas(self, num: int) -> Tensor:
        """The ids ``[num] int64`` that a canvas begins with."""
        ...

    def draw(self, logits_CV: Tensor) -> Tensor:
        """An id for each row, ``[C] int64``, drawn from the softmax of its logits."""
        ...

    def refill(self, num: int) -> Tensor:
        """Ids ``[num] int64`` for the positions that are not accepted; asked for even when all are."""
        ...


class SeededNoise:
    """Noise of a request's own generator, so that it does not depend on other requests.

    Random ids are uniform over all rows of the embedding. `is_greedy`, the meaning of temperature 0, replaces
    the draws by the argmax and leaves the random ids.
    """

    def __init__(self, vocab_size: int, generator: torch.Generator, *, is_greedy: bool = False) -> None:
        self.vocab_size = vocab_size
        self.generator = generator
        self.is_greedy = is_greedy

    def initial_canvas(self, num: int) -> Tensor:
        """Uniform ids ``[num] int64``."""
        return torch.randint(self.vocab_size, (num,), generator=self.generator, device=self.generator.device)

    def draw(self, logits_CV: Tensor) -> Tensor:
        """One id a row ``[C] int64``."""
        if self.is_greedy:
            return logits_CV.argmax(dim=-1)
        probs = logits_CV.float().softmax(dim=-1)
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(-1)

    def refill(self, num: int) -> Tensor:
        """Uniform ids ``[num] int64``."""
        return self.initial_canvas(num)


@dataclass(frozen=True, slots=True)
class CanvasStep:
    """What one denoising step decided.

    Attributes:
        argmax_C: ``[C] int64`` the most probable ids; of the last step, the finished canvas.
        sampled_C: ``[C] int64`` the drawn ids.
        entropy_C: ``[C] float32`` nats.
        accepted_C: ``[C] bool``.
        next_C: ``[C] int64`` canvas of the next step.
    """

    argmax_C: Tensor
    sampled_C: Tensor
    entropy_C: Tensor
    accepted_C: Tensor
    next_C: Tensor


def denoise_step(logits_CV: Tensor, noise: NoiseSource, entropy_bound: float) -> CanvasStep:
    """One step of one canvas.

    Args:
        logits_CV: ``[C, V]``, divided by the temperature of the step.
        noise: gives the draws and the ids of positions that are not accepted.
        entropy_bound: as in `CanvasRules`.
    """
    sampled_C = noise.draw(logits_CV)
    entropy_C = token_entropy(logits_CV)
    accepted_C = accept_by_entropy(entropy_C, entropy_bound)
    next_C = torch.where(accepted_C, sampled_C, noise.refill(len(sampled_C)))
    return CanvasStep(logits_CV.argmax(dim=-1), sampled_C, entropy_C, accepted_C, next_C)


def token_entropy(logits_CV: Tensor) -> Tensor:
    """Entropy of the softmax of each row in nats, ``[C] float32``; ids with logit -inf count nothing."""
    log_probs_CV = logits_CV.float().log_softmax(dim=-1)
    smallest = torch.finfo(torch.float32).min
    return -(log_probs_CV.exp() * log_probs_CV.clamp_min(smallest)).sum(dim=-1)


def accept_by_entropy(entropy_C: Tensor, entropy_bound: float) -> Tensor:
    """Positions whose strictly lower ranks sum up to the bound at most, ``[C] bool``.

    Ranks go by entropy, equal ones by position. The most certain position is always accepted.
    """
    ranked, order = torch.sort(entropy_C, stable=True)
    before = ranked.cumsum(dim=0) - ranked
    return torch.zeros_like(entropy_C, dtype=torch.bool).scatter(0, order, before <= entropy_bound)


class StopTest:
    """Says after each step of one canvas whether it is done; `reset` before the next canvas."""

    def __init__(self, rules: CanvasRules) -> None:
        self.rules = rules
        self._before: deque[Tensor] = deque(maxlen=rules.stability_threshold)
        self._num_steps = 0

    def is_done(self, step: CanvasStep) -> bool:
        """Whether the canvas is stable and certain, or has had all its steps."""
        self._num_steps += 1
        has_all = len(self._before) == self.rules.stability_threshold
        is_stable = has_all and all(torch.equal(step.argmax_C, before) for before in self._before)
        self._before.append(step.argmax_C)
        if self._num_steps >= self.rules.max_denoising_steps:
            return True
        return is_stable and bool(step.entropy_C.mean() < self.rules.confidence_threshold)

    def reset(self) -> None:
        """Forget the canvas."""
        self._before.clear()
        self._num_steps = 0
