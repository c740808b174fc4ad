"""Token embedding and output head, divided among processes by rows of the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import embedding

from diffulex.distributed.collectives import all_gather_last, all_reduce
from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.layer.lora import AdaptableLinear
from diffulex.layer.weights import WeightSlot

if TYPE_CHECKING:
    from torch import Tensor


class _VocabularyRows(nn.Module):
    """Holds the rows ``[rank * n, (rank + 1) * n)`` of a ``[vocab_size, hidden_size]`` matrix.

    A vocabulary that does not divide evenly is padded with rows of zeros at the end, their logits are cut.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, parallel: ParallelState = SINGLE
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        num_rows = -(-vocab_size // parallel.size)
        self.first_row = min(parallel.rank * num_rows, vocab_size)
        self.num_real_rows = min(num_rows, vocab_size - self.first_row)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype), requires_grad=False)
        self.weight.data[self.num_real_rows :] = 0

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``weight``."""
        shape = (self.vocab_size, self.weight.shape[1])
        return {"weight": WeightSlot(self.weight.data[: self.num_real_rows], shape, 0, self.first_row)}


class VocabEmbedding(_VocabularyRows):
    """Token ids -> vectors: ``[T] int64 -> [T, hidden_size]``."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """The embedding of each id; ids are below the vocabulary size."""
        if self.parallel.size == 1:
            return embedding(input_ids, self.weight)
        local = input_ids - self.first_row
        is_here = (local >= 0) & (local < self.num_real_rows)
        vectors = embedding(local * is_here, self.weight) * is_here.unsqueeze(-1)
        return all_reduce(vectors, self.parallel)

    def mean(self, probs: Tensor) -> Tensor:
        """Mean embedding under distributions over the vocabulary: ``[N, vocab_size] -> [N, hidden]``."""
        stop = self.first_row + self.num_real_rows
        local = probs[:, self.first_row : stop].to(self.weight.dtype)
        return all_reduce(local @ self.weight[: self.num_real_rows], self.parallel)


class OutputHead(_VocabularyRows, AdaptableLinear):
    """Hidden states -> logits: ``[N, hidden_size] -> [N, vocab_size]``, in the dtype of the weights."""

    def tie(self, source: VocabEmbedding) -> None:
        """Share the matrix of the embedding."""
        self.weight = source.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary, on every rank."""
        logits = all_gather_last(self.multiply(hidden), self.parallel)
        return logits if logits.shape[-1] == self.vocab_size else logits[:, : self.vocab_size].contiguous()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """``weight``."""
        return {"weight": replace(super().weight_slots()["weight"], adapt=self.adapt())}
