import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3Model

from diffulex_bench.tiny import bundled_model
from diffulex_bench.tiny.checkpoint import load_weights, save_checkpoint
from diffulex_bench.tiny.network import Network, block_causal_visibility
from diffulex_bench.tiny.recipe import RECIPES, Recipe
from diffulex_bench.tiny.tokenizer import TextEncoder, train_tokenizer

LAYER_SHAPES = {
    "input_layernorm.weight": ("H",),
    "post_attention_layernorm.weight": ("H",),
    "self_attn.q_proj.weight": ("N*D", "H"),
    "self_attn.k_proj.weight": ("K*D", "H"),
    "self_attn.v_proj.weight": ("K*D", "H"),
    "self_attn.o_proj.weight": ("H", "N*D"),
    "self_attn.q_norm.weight": ("D",),
    "self_attn.k_norm.weight": ("D",),
    "mlp.gate_proj.weight": ("I", "H"),
    "mlp.up_proj.weight": ("I", "H"),
    "mlp.down_proj.weight": ("H", "I"),
}


def published_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    shape = recipe.shape
    sizes = {
        "H": shape.hidden_size,
        "I": shape.intermediate_size,
        "D": shape.head_dim,
        "N*D": shape.num_heads * shape.head_dim,
        "K*D": shape.num_kv_heads * shape.head_dim,
    }
    expected = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    for layer in range(shape.num_layers):
        for name, axes in LAYER_SHAPES.items():
            expected[f"model.layers.{layer}.{name}"] = tuple(sizes[axis] for axis in axes)
    return expected


@pytest.fixture
def encoder() -> TextEncoder:
    return train_tokenizer(["one two three 123"], 300)


@pytest.fixture
def saved(tmp_path: Path, encoder: TextEncoder) -> tuple[Network, Path]:
    torch.manual_seed(0)
    network = Network(RECIPES["smoke"].shape)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_checkpoint(network, RECIPES["smoke"], encoder, tmp_path)
    return network, tmp_path


def test_saved_weights_have_the_published_names_and_shapes_in_bfloat16(saved: tuple[Network, Path]):
    weights = load_file(saved[1] / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == published_shapes(
        RECIPES["smoke"]
    )
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_loading_gives_the_saved_weights_back_rounded(saved: tuple[Network, Path]):
    network, folder = saved
    again = Network(RECIPES["smoke"].shape)
    load_weights(again, folder)
    for name, weight in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float())


def test_network_computes_what_the_qwen3_of_transformers_computes(saved: tuple[Network, Path]):
    _, folder = saved
    shape = RECIPES["smoke"].shape
    network = Network(shape).eval()
    load_weights(network, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "model_type", "torch_dtype")
    }
    theirs = Qwen3Model(Qwen3Config(**config, attn_implementation="eager")).eval()
    weights = {
        name.removeprefix("model."): value.float()
        for name, value in load_file(folder / "model.safetensors").items()
    }
    theirs.load_state_dict(weights)
    ids = torch.randint(0, shape.vocab_size, (2, 24))
    positions = torch.arange(24).expand(2, 24)
    visible = block_causal_visibility(24, 4, torch.device("cpu"))
    bias = torch.zeros(2, 1, 24, 24).masked_fill(~visible, float("-inf"))
    with torch.inference_mode():
        ours = network(ids, positions, visible)
        expected = theirs(
            input_ids=ids, position_ids=positions, attention_mask={"full_attention": bias}
        ).last_hidden_state
    # float32 on both sides; only the order of additions differs
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-4)


def test_bundled_checkpoint_is_complete_small_and_of_the_recipe():
    folder = bundled_model("tiny-sdar")
    recipe = RECIPES["sdar"]
    weights = load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == published_shapes(recipe)
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    assert (config["model_type"], config["block_size"]) == ("sdar", recipe.noise.block_size)
    assert (config["eos_token_id"], config["mask_token_id"]) == (0, 1)
    assert TextEncoder.load(folder).vocab_size == config["vocab_size"] == recipe.shape.vocab_size
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "README.md"):
        assert (folder / name).is_file()
