"""Runs DiffusionGemma over packed rows and pages without an engine: text is encoded, canvases denoised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex.attention.metadata import set_fetch_fn_for_attn_metadata
from diffulex.model.diffusion_gemma import DiffusionGemmaLM
from tests.support.paged import PagedRun, Part, load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


def load_gemma(folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionGemmaLM:
    model = load(folder, "diffusion_gemma", dtype)
    assert isinstance(model, DiffusionGemmaLM)
    return model


@dataclass
class Rows:
    """Rows of one request at positions ``[start, start + len)``; those from `canvas_start` on are a canvas.

    `expected` holds a row for each row of the canvas.
    """

    request: int
    ids: Tensor
    start: int = 0
    canvas_start: int | None = None
    is_stored: bool = False
    expected: Tensor | None = None


class CanvasRun(PagedRun):
    """A page pool for one DiffusionGemma network."""

    model: DiffusionGemmaLM

    def encode(self, texts: Sequence[tuple[int, Tensor, int]], attn_impl: str = "naive") -> list[Tensor]:
        """Stores texts, each (request, ids, start), and gives their hidden states."""
        parts = [Rows(request, ids, start, is_stored=True) for request, ids, start in texts]
        return self.forward(parts, attn_impl)

    def denoise(
        self,
        canvases: Sequence[tuple[int, Tensor, int]],
        previous: Sequence[Tensor] | None = None,
        attn_impl: str = "naive",
    ) -> list[Tensor]:
        """Logits of canvases, each (request, ids, start); `previous` are the tempered logits of a step."""
        parts = [
            Rows(
                request,
                ids,
                start,
                canvas_start=start,
                expected=None if previous is None else self.model.expected_embeds(previous[i]),
            )
            for i, (request, ids, start) in enumerate(canvases)
        ]
        return [self.model.compute_logits(hidden) for hidden in self.forward(parts, attn_impl)]

    @torch.inference_mode()
    def forward(self, parts: Sequence[Rows], attn_impl: str = "naive") -> list[Tensor]:
        """Hidden states of each part, all parts in one forward."""
        plain, anchors, canvas, expected = [], [], [], []
        for part in parts:
            stop = part.start + len(part.ids)
            positions = torch.arange(part.start, stop)
            first = stop if part.canvas_start is None else part.canvas_start
            is_canvas = positions >= first
            ends = torch.where(is_canvas, torch.full_like(positions, stop), positions + 1)
            plain.append(Part(part.request, part.ids, ends, part.start, part.is_stored))
            anchors.append(torch.where(is_canvas, torch.full_like(positions, first), positions))
            canvas.append(is_canvas)
            rows = torch.zeros(len(part.ids), self.model.hidden_size)
            if part.expected is not None:
                rows[is_canvas] = part.expected
            expected.append(rows)
        metadata = self._metadata(plain, attn_impl)
        metadata.window_anchors = torch.cat(anchors).int()
        set_fetch_fn_for_attn_metadata(lambda: metadata)
        hidden = self.model(
            torch.cat([part.ids for part in parts]),
            torch.cat([torch.arange(part.start, part.start + len(part.ids)) for part in parts]),
            is_canvas=_one_truth(torch.cat(canvas)),
            expected=None if all(part.expected is None for part in parts) else torch.cat(expected),
        )
        return list(hidden.split([len(part.ids) for part in parts]))


def _one_truth(is_canvas: Tensor) -> Tensor | bool:
    """The short form where all rows agree, as a runner would give it."""
    agreed = is_canvas.unique().tolist()
    return bool(agreed[0]) if len(agreed) == 1 else is_canvas
