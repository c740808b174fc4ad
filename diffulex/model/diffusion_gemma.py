"""DiffusionGemma's text network: one set of weights, run causally over text and freely over a canvas.

Text (a prompt, a finished canvas) is encoded: a row sees what is before it, keys and values are stored.
A canvas is denoised: its rows see all of it and the stored text, and nothing of it is stored. What a row sees
stands in the metadata of the forward; what else differs is said by `is_canvas`. Logits are not shifted.

The image part of the published checkpoints is not built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import torch
from torch import nn

from diffulex.distributed.state import SINGLE, ParallelState
from diffulex.layer.norm import RMSNorm, plain_rms_norm
from diffulex.layer.rotary import RotaryEmbedding
from diffulex.layer.weights import WeightSlot, prefixed, whole
from diffulex.model.decoder import DecoderConfig, DiffusionLM
from diffulex.model.diffusion_gemma_config import DiffusionGemmaConfig, read_gemma_config
from diffulex.model.diffusion_gemma_layer import GemmaLayer, GemmaMLP
from diffulex.utils.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from diffulex.utils.checkpoint import CheckpointFacts

_DECODER: Final = "model.decoder"
_ENCODER: Final = "model.encoder.language_model"


class SelfConditioning(nn.Module):
    """Adds to the embeddings of a canvas what the step before expected to stand there."""

    def __init__(self, config: DiffusionGemmaConfig, dtype: torch.dtype, parallel: ParallelState) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.pre_norm = RMSNorm(config.hidden_size, self.eps, dtype=dtype)
        self.mlp = GemmaMLP(config, dtype, parallel)

    def forward(self, embeds: Tensor, expected: Tensor | None) -> Tensor:
        """``[T, hidden] -> [T, hidden]``; without `expected` only the norm around the sum is left."""
        if expected is not None:
            embeds = embeds + self.mlp(self.pre_norm(expected))
        return plain_rms_norm(embeds, self.eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's names behind ``self_conditioning``."""
        return {**prefixed("pre_norm", self.pre_norm.weight_slots()), **self.mlp.weight_slots()}


class DiffusionGemmaLM(DiffusionLM):
    """google/diffusiongemma-26B-A4B-it and relatives, text only."""

    model_types = frozenset({"diffusion_gemma"})
    architectures = frozenset({"DiffusionGemmaForBlockDiffusion"})
    ignored_prefixes = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
    config: DiffusionGemmaConfig

    def __init__(
        self, config: DiffusionGemmaConfig, *, dtype: torch.dtype, parallel: ParallelState = SINGLE
    ) -> None:
        super().__init__(config, dtype=dtype, parallel=parallel)
        self.self_conditioning = SelfConditioning(config, dtype, parallel)
        self.rotaries = {shape.rope: RotaryEmbedding(*shape.rope) for shape in config.layers}
        # The factor on embeddings is itself a number of the model's type.
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5, device="cpu").to(dtype))
        self._stored_names: frozenset[str] = frozenset()

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> DiffusionGemmaConfig:
        """The shape that config.json states."""
        return read_gemma_config(facts, tensor_names)

    @classmethod
    def from_facts(
        cls,
        facts: CheckpointFacts,
        tensor_names: Collection[str],
        *,
        dtype: torch.dtype,
        parallel: ParallelState = SINGLE,
    ) -> Self:
        """The network of a checkpoint, its weights not yet filled."""
        model = cls(cls.read_config(facts, tensor_names), dtype=dtype, parallel=parallel)
        model._stored_names = frozenset(tensor_names)
        return model

    def make_layer(
        self, config: DecoderConfig, layer_id: int, dtype: torch.dtype, parallel: ParallelState
    ) -> nn.Module:
        """The layer of that number, its weights not yet filled."""
        assert isinstance(config, DiffusionGemmaConfig)
        return GemmaLayer(config, config.layers[layer_id], dtype, parallel)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeds: Tensor | None = None,
        is_canvas: Tensor | bool = False,
        expected: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: ``[T] int64``.
            positions: ``[T] int64``, absolute; a canvas goes on behind the text.
            embeds: ``[T, hidden]`` to use as they are in place of `input_embeds`.
            is_canvas: which rows belong to a canvas, ``[T] bool``, or one truth for all rows.
            expected: ``[T, hidden]`` from `expected_embeds` for canvas rows, zeros in the first step of a
                canvas; rows of text are not read. None: all canvases are in their first step.

        Returns:
            ``[T, hidden]``.
        """
        x = self.input_embeds(input_ids, is_canvas, expected) if embeds is None else embeds
        rotations = {rope: rotary.rotation(positions, x.dtype) for rope, rotary in self.rotaries.items()}
        for layer in self.gemma_layers():
            x = layer(x, rotations[layer.rope], is_canvas)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def input_embeds(self, input_ids: Tensor, is_canvas: Tensor | bool, expected: Tensor | None) -> Tensor:
        """What the first layer reads, ``[T, hidden]``; arguments as in `forward`."""
        embeds: Tensor = self.embedding(input_ids) * self.embed_scale
        if is_canvas is False:
            return embeds
        conditioned: Tensor = self.self_conditioning(embeds, expected)
        if is_canvas is True:
            return conditioned
        return torch.where(is_canvas.unsqueeze(-1), conditioned, embeds)

    def expected_embeds(self, logits: Tensor) -> Tensor:
        """The mean embedding under a step's prediction, which conditions the next step.

        Args:
            logits: ``[N, vocab_size]``, divided by the temperature of their step.

        Returns:
            ``[N, hidden]`` in the model's dtype.
        """
        probs = logits.to(self.dtype).softmax(dim=-1, dtype=torch.float32)
        return self.embedding.mean(probs) * self.embed_scale

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[N, hidden] -> [N, vocab_size] float32``, within the cap; row i predicts position i."""
        cap = self.config.logit_cap
        logits: Tensor = self.head(hidden)
        return cap * torch.tanh(logits.float() / cap)

    def gemma_layers(self) -> list[GemmaLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, GemmaLayer)]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the checkpoint must hold, by the checkpoint's name.

        Decoder and encoder share their weights and a file holds them once, under the decoder's or under the
        encoder's name. If it holds both, they must be equal. Only the layers' factors are two sets.
        """
        shared = {
            **prefixed("embed_tokens", self.embedding.weight_slots()),
            **prefixed("norm", self.final_norm.weight_slots()),
        }
        slots = prefixed(f"{_DECODER}.self_conditioning", self.self_conditioning.weight_slots())
        for layer_id, layer in enumerate(self.gemma_layers()):
            shared |= prefixed(f"layers.{layer_id}", layer.weight_slots())
            slots[f"{_DECODER}.layers.{layer_id}.layer_scalar"] = whole(layer.canvas_scalar)
            slots[f"{_ENCODER}.layers.{layer_id}.layer_scalar"] = whole(layer.encode_scalar)
        if not self.config.tie_word_embeddings:
            slots |= prefixed(self.names.head, self.head.weight_slots())
        for name, slot in shared.items():
            names = [
                full for full in (f"{_DECODER}.{name}", f"{_ENCODER}.{name}") if full in self._stored_names
            ]
            if len(names) == 2:
                slots |= _same_tensor(slot, names)
            else:
                slots[names[0] if names else f"{_DECODER}.{name}"] = slot
        return slots


@dataclass(frozen=True, slots=True)
class _SharedSlot(WeightSlot):
    """One of two names under which a checkpoint holds the same tensor, in either order."""

    slot: WeightSlot | None = None
    names: tuple[str, ...] = ()
    num_loaded: list[int] = field(default_factory=lambda: [0])

    def load(self, tensor: Tensor) -> None:
        """Fill the parameter the first time, compare with it the second time."""
        assert self.slot is not None
        before = self.target.clone() if self.num_loaded[0] else None
        self.slot.load(tensor)
        self.num_loaded[0] += 1
        if before is not None and not torch.equal(before, self.target):
            raise CheckpointError(
                f"{' and '.join(self.names)} must be the same tensor and they differ; "
                "remove the one that is wrong from the checkpoint"
            )


def _same_tensor(slot: WeightSlot, names: list[str]) -> dict[str, WeightSlot]:
    shared = _SharedSlot(slot.target, slot.shape, slot.dim, slot.start, slot, tuple(names), adapt=slot.adapt)
    return dict.fromkeys(names, shared)
