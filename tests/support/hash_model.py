"""A model whose every answer is a hash of exactly what a row can see, read through the real pages.

Keys and values are replaced by digests: a stored slot holds the digest of its token, its position and all it
saw when it was stored. One stale, missing or foreign slot changes every later answer, so equal tokens prove
that the cache was right. `expected_row` computes the same answer from the tokens alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from diffulex.attention.metadata import fetch_attn_metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

U64 = np.uint64
_A, _B, _C = U64(0x9E3779B97F4A7C15), U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit finaliser: every bit of the result depends on every bit of the input."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> U64(30))) * _B
        values = (values ^ (values >> U64(27))) * _C
        return values ^ (values >> U64(31))


def token_digests(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return mix(tokens.astype(U64) * _A + mix(positions.astype(U64) + _C))


def prefix_sums(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return np.concatenate((np.zeros(1, U64), np.cumsum(values, dtype=U64)))


def two_layers(
    tokens: NDArray[np.int64], positions: NDArray[np.int64], ends: NDArray[np.int64], salt: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """First-layer digests and answers of all rows of a sequence that starts at position 0."""
    own = token_digests(tokens, positions)
    with np.errstate(over="ignore"):
        first = mix(own + prefix_sums(own)[ends] * _A)
        answers = mix(first * _B + prefix_sums(first)[ends] + U64(salt))
    return first, answers


def logits_of(answers: NDArray[np.uint64], vocab_size: int, sharpness: float) -> torch.Tensor:
    """``[n, vocab_size] float32``: one favoured token a row, its probability spread over (0.05, 0.995)."""
    token = (answers % U64(vocab_size)).astype(np.int64)
    unit = ((answers >> U64(17)) % U64(100003)).astype(np.float64) / 100003
    prob = 0.05 + 0.945 * unit ** (1 / sharpness)
    logits = torch.zeros(len(answers), vocab_size)
    value = torch.from_numpy(np.log(prob * (vocab_size - 1) / (1 - prob))).float()
    logits[torch.arange(len(answers)), torch.from_numpy(token)] = value
    return logits


class HashModel:
    """Stands in for a language model in the runner; needs no weights and no attention layers."""

    num_layers = 1
    num_kv_heads = 1
    head_dim = 1

    def __init__(self, vocab_size: int, num_slots: int, *, salt: int = 0, sharpness: float = 1.0) -> None:
        self.vocab_size = vocab_size
        self.salt, self.sharpness = salt, sharpness
        self.own = np.zeros(num_slots, U64)
        self.first = np.zeros(num_slots, U64)
        self.num_rows = 0
        self.on_forward: Callable[[], None] | None = None

    def attention_layers(self) -> list[object]:
        return []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        meta = fetch_attn_metadata()
        tokens, places = input_ids.numpy(), positions.numpy()
        self.num_rows += len(tokens)
        answers = np.zeros(len(tokens), U64)
        slots, ends = meta.slot_mapping.numpy(), meta.visible_ends.numpy()
        borders, contexts = meta.cu_q_lens.numpy(), meta.context_lens.numpy()
        if self.on_forward is not None:
            self.on_forward()
        # Layer by layer over all requests, as a real model runs: store first, then attend.
        spans = [slice(borders[r], borders[r + 1]) for r in range(len(contexts))]
        reads = [self._slots_of(meta, r, int(contexts[r])) for r in range(len(contexts))]
        own = token_digests(tokens, places)
        stored = slots >= 0
        self.own[slots[stored]] = own[stored]
        first = np.zeros(len(tokens), U64)
        for rows, read in zip(spans, reads, strict=True):
            seen = prefix_sums(np.concatenate((self.own[read], own[rows])))
            with np.errstate(over="ignore"):
                first[rows] = mix(own[rows] + seen[np.minimum(ends[rows], len(seen) - 1)] * _A)
        self.first[slots[stored]] = first[stored]
        for rows, read in zip(spans, reads, strict=True):
            seen = prefix_sums(np.concatenate((self.first[read], first[rows])))
            with np.errstate(over="ignore"):
                answers[rows] = mix(
                    first[rows] * _B + seen[np.minimum(ends[rows], len(seen) - 1)] + U64(self.salt)
                )
        return torch.from_numpy(answers.view(np.int64).copy())

    def _slots_of(self, meta: object, request: int, length: int) -> NDArray[np.int64]:
        page_size = meta.page_size  # type: ignore[attr-defined]
        table = meta.page_tables[request].numpy()  # type: ignore[attr-defined]
        places = np.arange(length)
        return (
            (table[places // page_size].astype(np.int64) * page_size + places % page_size)
            if length
            else places
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden.numpy().view(U64), self.vocab_size, self.sharpness)
