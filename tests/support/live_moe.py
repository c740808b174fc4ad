"""Random tiny checkpoints of the families with experts, made from the transformers classes that are the same.

As in `live_families.py`: the class is the reference and gets the family's mask, the checkpoint is what the
family publishes. Qwen3Moe is SDAR's network with experts, Glm4Moe is LLaDA2's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.checkpoints import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCAB, MASK_ID, EOS_ID = 48, 0, 1

_SHARED: dict[str, st.SearchStrategy[Any]] = {
    "num_key_value_heads": st.sampled_from([1, 2]),
    "queries_per_key": st.sampled_from([1, 2, 3]),
    "head_dim": st.sampled_from([4, 8, 12]),
    "hidden_size": st.sampled_from([12, 24]),
    "intermediate_size": st.sampled_from([16, 20]),
    "moe_intermediate_size": st.sampled_from([6, 16]),
    "num_hidden_layers": st.integers(1, 3),
    "attention_bias": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    "rope_theta": st.sampled_from([1e4, 6e5]),
}


@st.composite
def sdar_moe_shapes(draw: Callable[..., Any]) -> dict[str, Any]:
    """Keywords of a Qwen3Moe configuration."""
    num_experts = draw(st.integers(2, 9))
    return draw(st.fixed_dictionaries(_SHARED)) | {
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 3)),
        "mlp_only_layers": draw(st.sampled_from([[], [0], [1, 2]])),
    }


@st.composite
def llada2_shapes(draw: Callable[..., Any]) -> dict[str, Any]:
    """Keywords of a Glm4Moe configuration. With one expert a token the two networks differ."""
    num_groups, group_size = draw(st.sampled_from([(1, 6), (1, 3), (2, 3), (4, 2), (3, 4)]))
    kept = draw(st.integers(1, num_groups))
    return draw(st.fixed_dictionaries(_SHARED)) | {
        "n_routed_experts": num_groups * group_size,
        "num_experts_per_tok": draw(st.integers(2, kept * group_size)),
        "n_group": num_groups,
        "topk_group": kept,
        "n_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0])),
        "use_qk_norm": True,
        "norm_topk_prob": True,
    }


def make_reference(config_class: Any, model_class: Any, shape: dict[str, Any], seed: int) -> Any:
    """The transformers model, random weights, float32."""
    shape = dict(shape)
    theta, factor = shape.pop("rope_theta"), shape.pop("partial_rotary_factor", 1.0)
    config = config_class(
        vocab_size=VOCAB,
        num_attention_heads=shape.pop("queries_per_key") * shape["num_key_value_heads"],
        max_position_embeddings=512,
        rope_theta=theta,
        partial_rotary_factor=factor,
        rope_parameters={"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor},
        **shape,
    )
    torch.manual_seed(seed)
    model = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                is_norm = "norm" in name
                parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm)
    return model.eval()


def make_sdar_moe(shape: dict[str, Any], seed: int) -> Any:
    return make_reference(Qwen3MoeConfig, Qwen3MoeForCausalLM, shape, seed)


def make_llada2(shape: dict[str, Any], seed: int) -> Any:
    return make_reference(Glm4MoeConfig, Glm4MoeForCausalLM, shape, seed)


def save_sdar_moe(model: Any, folder: Path) -> None:
    """The checkpoint under SDAR's name; its tensors have the names that it publishes."""
    model.save_pretrained(folder)
    stated = {
        "model_type": "sdar_moe",
        "architectures": ["SDARMoeForCausalLM"],
        "mask_token_id": MASK_ID,
        "num_experts": model.config.num_experts,
    }
    _write_config(folder, stated)


def save_llada2(model: Any, folder: Path) -> None:
    """The checkpoint in LLaDA2's own names, its projections fused."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    config = model.config
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{prefix}{part}_proj.{kind}", None) for part in "qkv"]
            if parts[0] is not None:
                weights[f"{prefix}query_key_value.{kind}"] = torch.cat([p for p in parts if p is not None])
    save_file({_llada2_name(name): tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    stated = {
        "model_type": "llada2_moe",
        "architectures": ["LLaDA2MoeModelLM"],
        "use_qkv_bias": config.attention_bias,
        "use_bias": False,
        "num_experts": config.n_routed_experts,
        "num_shared_experts": config.n_shared_experts,
        "partial_rotary_factor": config.rope_parameters["partial_rotary_factor"],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    _write_config(folder, stated)


def _llada2_name(name: str) -> str:
    for theirs, ours in (
        ("embed_tokens", "word_embeddings"),
        ("self_attn", "attention"),
        ("o_proj", "dense"),
        ("q_norm", "query_layernorm"),
        ("k_norm", "key_layernorm"),
        ("e_score_correction_bias", "expert_bias"),
    ):
        name = name.replace(theirs, ours)
    return name


def _write_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, VOCAB, mask_id=MASK_ID, eos_ids=(EOS_ID,))
