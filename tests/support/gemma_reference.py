"""Tiny random DiffusionGemma networks of transformers, as references and as checkpoint folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

from tests.support.checkpoints import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 48
VISION = {
    "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "patch_size": 2,
    "position_embedding_size": 8, "pooling_kernel_size": 1,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "global_head_dim": 8,
    "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 8,
    "max_position_embeddings": 512,
}  # fmt: skip


def make_reference(seed: int, canvas_length: int = 8, **text: Any) -> DiffusionGemmaForBlockDiffusion:
    """A network with random weights in which the encoder's factors differ from the decoder's."""
    config = DiffusionGemmaConfig(
        text_config={**TEXT, **text}, vision_config=VISION, canvas_length=canvas_length
    )
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_factor = "norm" in name or "scale" in name
            parameter.copy_(torch.randn_like(parameter) * (0.2 if is_factor else 0.3) + is_factor)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model.eval()


def save_reference(model: DiffusionGemmaForBlockDiffusion, folder: Path, num_shards: int = 1) -> Path:
    """The checkpoint as transformers writes it, with a tokenizer beside it."""
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // num_shards + 1 if num_shards > 1 else "1GB")
    write_tokenizer(folder, VOCAB, mask_id=4, eos_ids=(1,))
    return folder


class Reference:
    """One request of the reference network, with its cache."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config())

    @torch.inference_mode()
    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[L, hidden]``; the cache holds the text afterwards."""
        hidden: torch.Tensor = self.model.model.encoder(
            input_ids=ids[None], cache=self.cache
        ).last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def denoise(self, canvas: torch.Tensor, previous: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[C, V]`` of a canvas behind what is cached."""
        logits: torch.Tensor = self.model(
            cache=self.cache,
            decoder_input_ids=canvas[None],
            self_conditioning_logits=None if previous is None else previous[None],
        ).logits
        return logits[0]
