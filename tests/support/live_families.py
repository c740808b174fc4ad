"""Random tiny checkpoints of the dense families, each made from the transformers class that is its network.

The class is the reference: an existing autoregressive network that gets the family's mask. The checkpoint is
what the family publishes, in its own names and its own config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.checkpoints import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCAB, MASK_ID, EOS_ID = 48, 0, 1

SHAPES = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2]),
        "queries_per_key": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([4, 8, 16]),
        "hidden_size": st.sampled_from([12, 24]),
        "intermediate_size": st.sampled_from([16, 20]),
        "num_hidden_layers": st.integers(1, 3),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
        "rope_theta": st.sampled_from([1e4, 1e6]),
    }
)

LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def as_llada(config: dict[str, Any]) -> dict[str, Any]:
    """config.json under OLMo's keys, as the published ones are."""
    return {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "mlp_hidden_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_sequence_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "embedding_size": config["vocab_size"],
        "weight_tying": config["tie_word_embeddings"],
        "activation_type": "silu",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "include_bias": False,
        "include_qkv_bias": False,
        "rope": True,
        "rope_full_precision": True,
        "mask_token_id": MASK_ID,
        "eos_token_id": EOS_ID,
    }


def named(model_type: str, architecture: str, **keys: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """config.json as transformers wrote it, under the family's name."""
    names = {"model_type": model_type, "architectures": [architecture], "mask_token_id": MASK_ID}
    return lambda config: {**config, **names, **keys}


@dataclass(frozen=True)
class LiveFamily:
    """`has_free_heads`: the head width need not be the width of the model divided by the heads."""

    config_class: type[Any]
    model_class: type[Any]
    as_published: Callable[[dict[str, Any]], dict[str, Any]]
    has_free_heads: bool = False
    may_have_bias: bool = False
    tensor_names: dict[str, str] | None = None

    def make_reference(self, shape: dict[str, Any], seed: int) -> Any:
        """The transformers model, random weights, float32."""
        shape = dict(shape)
        heads = shape.pop("queries_per_key") * shape["num_key_value_heads"]
        theta = shape.pop("rope_theta")
        if not self.has_free_heads:
            shape["hidden_size"] = heads * shape.pop("head_dim")
        if not self.may_have_bias:
            del shape["attention_bias"]
        config = self.config_class(
            vocab_size=VOCAB,
            num_attention_heads=heads,
            max_position_embeddings=512,
            rope_theta=theta,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            **shape,
        )
        torch.manual_seed(seed)
        model = self.model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
        return model.eval()

    def save(self, model: Any, folder: Path, num_shards: int = 1) -> None:
        """The checkpoint as the family publishes it."""
        size = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=size // num_shards + 1 if num_shards > 1 else "1GB")
        if self.tensor_names:
            for file in folder.glob("*.safetensors"):
                save_file({self._renamed(name): t for name, t in load_file(file).items()}, file)
            for index in folder.glob("*.index.json"):
                content = json.loads(index.read_text())
                content["weight_map"] = {self._renamed(n): f for n, f in content["weight_map"].items()}
                index.write_text(json.dumps(content))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(self.as_published(config)))
        write_tokenizer(folder, VOCAB, mask_id=MASK_ID, eos_ids=(EOS_ID,))

    def _renamed(self, name: str) -> str:
        for theirs, ours in (self.tensor_names or {}).items():
            name = name.replace(theirs, ours)
        return name


FAMILIES = {
    "dream": LiveFamily(Qwen2Config, Qwen2ForCausalLM, named("Dream", "DreamModel")),
    "diffucoder": LiveFamily(Qwen2Config, Qwen2ForCausalLM, named("Dream", "DreamModel")),
    "fast_dllm_v2": LiveFamily(
        Qwen2Config, Qwen2ForCausalLM, named("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", bd_size=32)
    ),
    "dream_reasoner": LiveFamily(
        Qwen3Config, Qwen3ForCausalLM, named("Dream", "DreamForCausalLM", block_size=32),
        has_free_heads=True, may_have_bias=True,
    ),
    "sdar": LiveFamily(
        Qwen3Config, Qwen3ForCausalLM, named("sdar", "SDARForCausalLM", block_size=4),
        has_free_heads=True, may_have_bias=True,
    ),
    "stable_diffcoder": LiveFamily(
        LlamaConfig, LlamaForCausalLM, named("llama", "StableDiffcoderForCausalLM"), has_free_heads=True
    ),
    "llada": LiveFamily(LlamaConfig, LlamaForCausalLM, as_llada, tensor_names=LLADA_NAMES),
}  # fmt: skip
