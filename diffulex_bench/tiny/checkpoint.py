"""A trained network as a checkpoint folder in the layout that SDAR publishes, and back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from diffulex_bench.tiny.network import Network
from diffulex_bench.tiny.recipe import Recipe
from diffulex_bench.tiny.tokenizer import EOS_ID, MASK_ID, PAD_ID, TextEncoder, save_tokenizer


def save_checkpoint(network: Network, recipe: Recipe, encoder: TextEncoder, folder: Path) -> None:
    """Write configuration, bfloat16 weights and tokenizer, so that the folder is a complete model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(encoder, folder, recipe.shape.max_positions)
    _write_json(folder / "config.json", _config(recipe))
    generation = {"bos_token_id": EOS_ID, "do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16) for name, weight in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(network: Network, folder: Path) -> None:
    """Fill the network from the folder's weights, which must be exactly those of its shape."""
    from safetensors.torch import load_file

    network.load_state_dict(load_file(folder / "model.safetensors"))


def _config(recipe: Recipe) -> dict[str, object]:
    shape = recipe.shape
    return {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": recipe.noise.block_size,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": shape.max_positions,
        "model_type": "sdar",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
