"""Checkpoint folders of every family in their published layout: config.json, tokenizer files, weight headers.

Weights are holes in the file, so that a folder of real size costs no space; nobody may load them.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]

_QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip
_SDAR = {
    **_QWEN, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "head_dim": 16, "block_size": 4,
    "mask_token_id": 120, "eos_token_id": 121, "attention_bias": False,
}  # fmt: skip
_DREAM = {
    **_QWEN, "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": 120,
    "eos_token_id": 121, "max_position_embeddings": 131072,
}  # fmt: skip
_LLADA2 = {
    **_QWEN, "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "head_dim": 16,
    "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "partial_rotary_factor": 0.5, "pad_token_id": 121, "eos_token_id": 121,
    "max_position_embeddings": 16384,
}  # fmt: skip

#: config.json by model name, tiny, in the keys of the published files.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "dream": _DREAM,
    "diffucoder": _DREAM,
    "dream_reasoner": {
        **_DREAM, "architectures": ["DreamForCausalLM"], "head_dim": 16, "block_size": 32,
        "attention_bias": False, "max_position_embeddings": 32768,
    },
    "sdar": _SDAR,
    "sdar_moe": {
        **_SDAR, "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe",
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "stable_diffcoder": {
        **_QWEN, "architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama",
        "rope_theta": 500000.0, "eos_token_id": 121, "max_position_embeddings": 8192,
    },
    "fast_dllm_v2": {
        **_QWEN, "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
        "bd_size": 32, "eos_token_id": 121, "pad_token_id": 121,
    },
    "llada": {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 32, "n_layers": 2, "n_heads": 4,
        "n_kv_heads": 4, "mlp_hidden_size": 48, "vocab_size": 128, "embedding_size": 128,
        "weight_tying": False, "max_sequence_length": 4096, "block_type": "llama", "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "mask_token_id": 120, "eos_token_id": 121, "pad_token_id": 121,
    },
    **dict.fromkeys(("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax"), _LLADA2),
    "diffusion_gemma": {
        "architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma",
        "canvas_length": 256, "tie_word_embeddings": True, "eos_token_id": [121, 119], "dtype": "bfloat16",
        "text_config": {
            "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 8, "vocab_size": 128, "hidden_activation":
            "gelu_pytorch_tanh", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "use_bidirectional_attention": "vision", "attention_bias": False,
        },
    },
}  # fmt: skip

#: Sizes of published checkpoints, in the files' own keys.
PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SDAR-4B-Chat": (
        "sdar",
        {
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "mask_token_id": 151669,
            "eos_token_id": 151643,
        },
    ),
    "LLaDA2.0-mini": (
        "llada2_mini",
        {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 157184,
            "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "eos_token_id": 156892,
        },
    ),
    "diffusiongemma-26B-A4B-it": (
        "diffusion_gemma",
        {
            "text_config": {
                **CONFIGS["diffusion_gemma"]["text_config"], "hidden_size": 2816, "intermediate_size": 2112,
                "num_hidden_layers": 30, "num_attention_heads": 16, "head_dim": 256, "num_key_value_heads": 8,
                "global_head_dim": 512, "num_global_key_value_heads": 2, "sliding_window": 1024,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "num_experts": 128,
                "top_k_experts": 8, "moe_intermediate_size": 704, "vocab_size": 262144,
            },
        },
    ),
}  # fmt: skip


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the weights that a checkpoint with this config.json holds."""
    kind = config["model_type"]
    if kind == "llada":
        return dict(_llada(config))
    if kind == "llada2_moe":
        return dict(_llada2(config))
    if kind == "diffusion_gemma":
        return dict(_gemma(config["text_config"]))
    return dict(_qwen(config))


def write_family(
    folder: Path, model_name: str, sizes: Mapping[str, Any] | None = None, *, num_shards: int = 1
) -> Path:
    """A folder of the family, tiny or with other `sizes`; the mask and end tokens are in its tokenizer."""
    config = {**CONFIGS[model_name], **(sizes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, model_name, config)
    shapes = shapes_of(config)
    if num_shards == 1:
        write_hole(folder / "model.safetensors", shapes)
        return folder
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        names = list(shapes)[number::num_shards]
        write_hole(folder / file, {name: shapes[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_adapter(folder: Path) -> Path:
    """A PEFT adapter of one layer of a family whose projections are called as in Qwen."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{prefix}.lora_A.weight": (2, 32), f"{prefix}.lora_B.weight": (32, 2)}
    write_hole(folder / "adapter_model.safetensors", shapes)
    return folder


def write_hole(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file with a whole header and, in place of the numbers, a hole of the right length."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * 2
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + offset)


def _write_tokenizer(folder: Path, model_name: str, config: Mapping[str, Any]) -> None:
    """Few words, and the special ones at the ids that config.json names or at 120 and 121."""
    stated = config.get("eos_token_id")
    mask_id = config.get("mask_token_id", 120)
    eos_id = stated if isinstance(stated, int) else 121
    mask = {"fast_dllm_v2": "|<MASK>|"}.get(model_name, "<|mask|>")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": mask_id, "content": mask, "special": True},
            {"id": eos_id, "content": "<|endoftext|>", "special": True},
        ],
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(20)}, "unk_token": "w0"},
    }
    roles: dict[str, Any] = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    if model_name not in ("fast_dllm_v2", "llada"):
        roles["mask_token"] = mask
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def _qwen(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, kv_heads = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width = config.get("head_dim", hidden // heads)
    kind = config["architectures"][0]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{part}_proj.weight", (count * width, hidden)
            if kind in ("DreamModel", "Fast_dLLM_QwenForCausalLM"):
                yield f"{prefix}self_attn.{part}_proj.bias", (count * width,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads * width)
        if kind in ("SDARForCausalLM", "SDARMoeForCausalLM", "DreamForCausalLM"):
            yield f"{prefix}self_attn.q_norm.weight", (width,)
            yield f"{prefix}self_attn.k_norm.weight", (width,)
        if "num_experts" in config:
            yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


def _llada(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config["d_model"], config["mlp_hidden_size"]
    keys = config["n_kv_heads"] * hidden // config["n_heads"]
    yield "model.transformer.wte.weight", (config["embedding_size"], hidden)
    yield "model.transformer.ln_f.weight", (hidden,)
    yield "model.transformer.ff_out.weight", (config["embedding_size"], hidden)
    for layer in range(config["n_layers"]):
        prefix = f"model.transformer.blocks.{layer}."
        yield f"{prefix}attn_norm.weight", (hidden,)
        yield f"{prefix}ff_norm.weight", (hidden,)
        for part, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys), ("attn_out", hidden)):
            yield f"{prefix}{part}.weight", (rows, hidden)
        yield f"{prefix}ff_proj.weight", (width, hidden)
        yield f"{prefix}up_proj.weight", (width, hidden)
        yield f"{prefix}ff_out.weight", (hidden, width)


def _llada2(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "model.word_embeddings.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}attention.query_key_value.weight", ((heads + 2 * kv_heads) * width, hidden)
        yield f"{prefix}attention.query_layernorm.weight", (width,)
        yield f"{prefix}attention.key_layernorm.weight", (width,)
        yield f"{prefix}attention.dense.weight", (hidden, heads * width)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
        yield f"{prefix}mlp.gate.expert_bias", (config["num_experts"],)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        yield from _mlp(f"{prefix}mlp.shared_experts.", hidden, config["moe_intermediate_size"])


def _gemma(text: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["intermediate_size"]
    experts, expert_width = text["num_experts"], text["moe_intermediate_size"]
    yield "model.decoder.embed_tokens.weight", (text["vocab_size"], hidden)
    yield "model.decoder.norm.weight", (hidden,)
    yield "model.decoder.self_conditioning.pre_norm.weight", (hidden,)
    yield from _mlp("model.decoder.self_conditioning.", hidden, width)
    yield "model.encoder.vision_tower.patch_embedder.input_proj.weight", (hidden, 12)
    for layer, kind in enumerate(text["layer_types"]):
        prefix, is_full = f"model.decoder.layers.{layer}.", kind == "full_attention"
        head = text["global_head_dim"] if is_full else text["head_dim"]
        keys = head * (text["num_global_key_value_heads"] if is_full else text["num_key_value_heads"])
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        for norm in (*(f"{one}_layernorm" for one in norms), "post_feedforward_layernorm_1",
                     "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):  # fmt: skip
            yield f"{prefix}{norm}.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (heads * head, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (keys, hidden)
        if not is_full:
            yield f"{prefix}self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{prefix}self_attn.q_norm.weight", (head,)
        yield f"{prefix}self_attn.k_norm.weight", (head,)
        yield from _mlp(f"{prefix}mlp.", hidden, width)
        yield f"{prefix}router.proj.weight", (experts, hidden)
        yield f"{prefix}router.scale", (hidden,)
        yield f"{prefix}router.per_expert_scale", (experts,)
        yield f"{prefix}experts.gate_up_proj", (experts, 2 * expert_width, hidden)
        yield f"{prefix}experts.down_proj", (experts, hidden, expert_width)
        yield f"{prefix}layer_scalar", (1,)
        yield f"model.encoder.language_model.layers.{layer}.layer_scalar", (1,)
