"""Checkpoint folders made on the fly: a stub for fake models, and a random SDAR network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int, *, mask_id: int, eos_ids: Sequence[int]) -> None:
    """A word-level tokenizer whose words are ``w0``, ``w1``, ...; id i is the word ``wi``."""
    names = {i: f"w{i}" for i in range(vocab_size)}
    names[mask_id] = "<|MASK|>"
    for number, eos_id in enumerate(eos_ids):
        names[eos_id] = f"<|end{number}|>"
    special = [mask_id, *eos_ids]
    added = [
        {
            "id": i,
            "content": names[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in sorted(special)
    ]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {name: i for i, name in names.items()},
            "unk_token": names[2],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "mask_token": names[mask_id],
        "eos_token": names[eos_ids[0]] if eos_ids else None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sdar_config(vocab_size: int, *, mask_id: int, eos_ids: Sequence[int], **overrides: Any) -> dict[str, Any]:
    """config.json of a very small SDAR network."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": 4,
        "bos_token_id": None,
        "eos_token_id": list(eos_ids),
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "mask_token_id": mask_id,
        "max_position_embeddings": 4096,
        "model_type_note": "made by the tests",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        **overrides,
    }


def write_stub(
    folder: Path, vocab_size: int, *, mask_id: int, eos_ids: Sequence[int], **overrides: Any
) -> Path:
    """A folder whose weights nobody reads; for engines with a fake model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab_size, mask_id=mask_id, eos_ids=eos_ids)
    config = sdar_config(vocab_size, mask_id=mask_id, eos_ids=eos_ids, **overrides)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(vocab_size, 16)}, folder / "model.safetensors")
    return folder


def write_random_sdar(
    folder: Path, vocab_size: int = 64, *, mask_id: int = 0, eos_ids: Sequence[int] = (1,), seed: int = 0,
    scale: float = 0.35, **overrides: Any,
) -> Path:  # fmt: skip
    """A loadable SDAR network with random weights, sharp enough to have clear favourites."""
    write_stub(folder, vocab_size, mask_id=mask_id, eos_ids=eos_ids, **overrides)
    config = json.loads((folder / "config.json").read_text())
    draw = torch.Generator().manual_seed(seed)
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def normal(*size: int, std: float = scale) -> torch.Tensor:
        return torch.randn(*size, generator=draw) * std

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(vocab_size, hidden, std=1.0),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": normal(heads * width, hidden),
            f"{prefix}self_attn.k_proj.weight": normal(kv_heads * width, hidden),
            f"{prefix}self_attn.v_proj.weight": normal(kv_heads * width, hidden),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, heads * width),
            f"{prefix}self_attn.q_norm.weight": torch.ones(width),
            f"{prefix}self_attn.k_norm.weight": torch.ones(width),
            f"{prefix}mlp.gate_proj.weight": normal(config["intermediate_size"], hidden),
            f"{prefix}mlp.up_proj.weight": normal(config["intermediate_size"], hidden),
            f"{prefix}mlp.down_proj.weight": normal(hidden, config["intermediate_size"]),
        }
    save_file(weights, folder / "model.safetensors")
    return folder
