"""Logits -> chosen token and its confidence. Axes: N rows, V vocabulary.

Confidence is always the chosen token's probability in the softmax over the whole vocabulary at temperature 1,
in float32; only the draw itself sees temperature, top-k and top-p. The greedy choice is the exact argmax,
ties going to the lowest id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.sampling_params import FORCE_SCORES

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.sampler.base import SamplerInput


def allowed_logits(logits_NV: Tensor, banned_id: int, vocab_limit: int) -> Tensor:
    """Float32 copy of the logits with -inf at ids that never win."""
    allowed = logits_NV.to(torch.float32, copy=True)
    allowed[:, vocab_limit:] = float("-inf")
    allowed[:, banned_id] = float("-inf")
    return allowed


def choose_tokens(logits_NV: Tensor, inputs: SamplerInput) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen token, its probability, and the score that ranks positions inside a block, each ``[N]``."""
    logits = logits_NV.float()
    allowed = allowed_logits(logits_NV, inputs.banned_id, inputs.vocab_limit)
    token_N = allowed.argmax(dim=-1)
    if inputs.temperature_N is not None:
        drawn_N = draw_tokens(allowed, inputs)
        token_N = torch.where(inputs.temperature_N > 0, drawn_N, token_N)
    log_total_N = logits.logsumexp(dim=-1)
    chosen_N = allowed.gather(1, token_N[:, None])[:, 0]
    # A row that leaves no id to choose from is as useless as one with NaN.
    confidence_N = (chosen_N - log_total_N).exp().masked_fill(chosen_N.isneginf(), float("nan"))
    return token_N, confidence_N, _force_scores(logits, log_total_N, confidence_N, inputs)


def draw_tokens(allowed_NV: Tensor, inputs: SamplerInput) -> Tensor:
    """One token a row from softmax(logits / temperature) cut to top-k, then to top-p; ``[N] int64``.

    Inverse of the cumulative distribution at the row's own uniform number, in float64, so that a row's draw
    depends on nothing but its logits and that number. Rows of temperature 0 give a token that is not used.
    """
    temperature_N, top_p_N = inputs.temperature_N, inputs.top_p_N
    top_k_N, uniform_N = inputs.top_k_N, inputs.uniform_N
    if temperature_N is None or top_p_N is None or top_k_N is None or uniform_N is None:
        raise ValueError("a draw needs temperature, top_p, top_k and a uniform number for each row")
    heat_N1 = torch.where(temperature_N > 0, temperature_N, 1.0)[:, None]
    # Relative to the best id, so that a temperature close to 0 cannot overflow.
    scaled_NV = (allowed_NV - allowed_NV.amax(dim=-1, keepdim=True)).double() / heat_N1.double()
    prob_NV, ids_NV = scaled_NV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(prob_NV.shape[1], device=prob_NV.device)
    limit_N1 = torch.where(top_k_N > 0, top_k_N, prob_NV.shape[1])[:, None]
    prob_NV = torch.where(rank_V < limit_N1, prob_NV, 0.0)
    prob_NV = prob_NV / prob_NV.sum(dim=-1, keepdim=True)
    before_NV = prob_NV.cumsum(dim=-1) - prob_NV
    # The token that crosses top_p stays, so at least one token always does.
    prob_NV = torch.where(before_NV < top_p_N[:, None], prob_NV, 0.0)
    total_NV = prob_NV.cumsum(dim=-1)
    target_N1 = (uniform_N.double() * total_NV[:, -1])[:, None]
    last_N1 = (prob_NV > 0).sum(dim=-1, keepdim=True) - 1
    index_N1 = torch.searchsorted(total_NV, target_N1, right=True).minimum(last_N1.clamp(min=0))
    return ids_NV.gather(1, index_N1)[:, 0]


def _force_scores(logits: Tensor, log_total_N: Tensor, confidence_N: Tensor, inputs: SamplerInput) -> Tensor:
    if inputs.force_score_N is None:
        return confidence_N
    prob_NV = (logits - log_total_N[:, None]).exp()
    best_N2 = prob_NV.topk(2, dim=-1).values
    scores = {
        "prob": confidence_N,
        "margin": best_N2[:, 0] - best_N2[:, 1],
        "neg_entropy": (prob_NV * (prob_NV + 1e-10).log()).sum(dim=-1),
    }
    stacked = torch.stack([scores[name] for name in FORCE_SCORES])
    return stacked.gather(0, inputs.force_score_N[None])[0]
