"""What each dense family reads of its config.json, what it calls its own, and what it refuses."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.config import Config, ConfigError
from diffulex.layer.rotary import RotaryEmbedding, rotate
from diffulex.model.catalog import AutoModel, family_of, names_of
from diffulex.utils.checkpoint import CheckpointError, CheckpointFacts, read_checkpoint
from tests.support.live_families import FAMILIES, MASK_ID, VOCAB
from tests.support.paged import PagedRun, Part, load

SHAPE = {
    "num_key_value_heads": 2,
    "queries_per_key": 2,
    "head_dim": 8,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
#: Names that the checkpoint of each family may be loaded under.
NAMES = {name: (name,) for name in FAMILIES} | dict.fromkeys(("dream", "diffucoder"), ("diffucoder", "dream"))
INDEX = "model.safetensors.index.json"
EACH_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def published() -> Any:
    """One small checkpoint of each family, by name."""
    with tempfile.TemporaryDirectory() as root:
        for name, family in FAMILIES.items():
            family.save(family.make_reference(SHAPE, seed=1), Path(root) / name, num_shards=3)
        yield Path(root)


def copy_of(folder: Path, to: Path, **changes: Any) -> Path:
    """The checkpoint after changes to config.json; `...` removes a key."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = {**json.loads((to / "config.json").read_text()), **changes}
    (to / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return to


def weight_map(folder: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return files


def a_norm(folder: Path) -> tuple[str, Path]:
    """The first norm in the index, and its shard."""
    name = next(name for name in weight_map(folder) if "norm" in name)
    return name, folder / weight_map(folder)[name]


def refusal(folder: Path, name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, name)
    return str(caught.value)


class TestRecognition:
    @EACH_FAMILY
    def test_a_checkpoint_is_its_own_familys_and_nobody_elses(self, published: Path, name: str) -> None:
        facts = read_checkpoint(published / name)
        assert names_of(facts) == NAMES[name]
        for other in AutoModel.names():
            if other in NAMES[name]:
                assert family_of(other, facts) is AutoModel.get(name)
                continue
            with pytest.raises(CheckpointError) as caught:
                family_of(other, facts)
            assert f"is no {other} checkpoint" in str(caught.value)
            assert str(caught.value).endswith(f"set model_name to {' or '.join(map(repr, NAMES[name]))}")

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"architectures": ..., "block_size": ...}, ("dream_reasoner",)),
            ({"architectures": ["Renamed"], "block_size": 32}, ("dream_reasoner",)),
            ({"model_type": ..., "block_size": ...}, ("dream_reasoner",)),
        ],
    )
    def test_a_reasoner_is_told_by_its_class_its_block_or_its_norms(
        self, published: Path, tmp_path: Path, changes: dict[str, Any], names: tuple[str, ...]
    ) -> None:
        folder = copy_of(published / "dream_reasoner", tmp_path, **changes)
        assert names_of(read_checkpoint(folder)) == names

    def test_dream_without_its_class_is_dream(self, published: Path, tmp_path: Path) -> None:
        folder = copy_of(published / "dream", tmp_path, architectures=...)
        assert names_of(read_checkpoint(folder)) == ("diffucoder", "dream")

    def test_stable_diffcoder_is_told_by_the_code_that_comes_with_it(
        self, published: Path, tmp_path: Path
    ) -> None:
        code = {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"}
        changes = {"architectures": ["LlamaForCausalLM"], "auto_map": code}
        facts = read_checkpoint(copy_of(published / "stable_diffcoder", tmp_path, **changes))
        assert names_of(facts) == ("stable_diffcoder",)

    def test_a_plain_llama_is_nobodys(self, published: Path, tmp_path: Path) -> None:
        folder = copy_of(published / "stable_diffcoder", tmp_path, architectures=["LlamaForCausalLM"])
        assert names_of(read_checkpoint(folder)) == ()
        message = refusal(folder, "stable_diffcoder")
        assert "is no stable_diffcoder checkpoint" in message
        assert "set model_name to the family of the checkpoint, if it is one of diffucoder, " in message

    def test_a_checkpoint_that_states_nothing_is_taken_at_the_users_word(
        self, published: Path, tmp_path: Path
    ) -> None:
        folder = copy_of(published / "dream", tmp_path, model_type=..., architectures=...)
        assert load(folder, "dream").num_layers == 2


class TestErrors:
    @EACH_FAMILY
    def test_a_truncated_shard_is_named(self, published: Path, tmp_path: Path, name: str) -> None:
        folder = copy_of(published / name, tmp_path)
        _, shard = a_norm(folder)
        shard.write_bytes(shard.read_bytes()[:-4])
        assert refusal(folder, name).startswith(f"{shard} is truncated or damaged")

    @EACH_FAMILY
    def test_a_weight_that_is_no_number_is_named(self, published: Path, tmp_path: Path, name: str) -> None:
        folder = copy_of(published / name, tmp_path)
        tensor_name, shard = a_norm(folder)
        weights = load_file(shard)
        weights[tensor_name][3] = torch.nan
        save_file(weights, shard)
        message = refusal(folder, name)
        assert message.startswith(f"{tensor_name} in {shard} holds 1 values that are not finite")

    @EACH_FAMILY
    def test_a_vocabulary_without_the_mask_id_is_refused(
        self, published: Path, tmp_path: Path, name: str
    ) -> None:
        folder = copy_of(published / name, tmp_path, mask_token_id=VOCAB)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end0|>"}))
        with pytest.raises(ConfigError) as caught:
            Config(model=str(folder), model_name=name, decoding_strategy="multi_bd")
        (problem,) = caught.value.problems
        assert problem.startswith(f"mask_token_id stands nowhere in {folder} with one of its {VOCAB} ids")
        assert f"config.json: mask_token_id ({VOCAB} is outside the vocabulary of {VOCAB})" in problem

    @EACH_FAMILY
    def test_a_missing_tensor_is_named_as_the_family_names_it(
        self, published: Path, tmp_path: Path, name: str
    ) -> None:
        folder = copy_of(published / name, tmp_path)
        tensor_name, shard = a_norm(folder)
        save_file({key: one for key, one in load_file(shard).items() if key != tensor_name}, shard)
        rest = {key: file for key, file in weight_map(folder).items() if key != tensor_name}
        (folder / INDEX).write_text(json.dumps({"weight_map": rest}))
        assert f"1 missing: {tensor_name};" in refusal(folder, name)

    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            *((name, ("rope_parameters", "rms_norm_eps", "num_key_value_heads", "hidden_size",
                      "intermediate_size", "num_hidden_layers"))
              for name in ("dream", "diffucoder", "dream_reasoner", "fast_dllm_v2", "stable_diffcoder")),
            ("llada", ("rope_theta", "rms_norm_eps", "d_model", "n_heads", "n_layers")),
        ],
    )  # fmt: skip
    def test_numbers_that_the_network_needs_are_never_assumed(
        self, published: Path, tmp_path: Path, name: str, keys: tuple[str, ...]
    ) -> None:
        message = refusal(copy_of(published / name, tmp_path, **dict.fromkeys(keys, ...)), name)
        for key in keys:
            assert f"{key.replace('parameters', 'theta')} must be a positive" in message
        assert message.count("it is absent") == len(keys)

    @pytest.mark.parametrize(
        ("name", "key", "value"),
        [
            ("dream", "use_sliding_window", True),
            ("dream", "hidden_act", "gelu"),
            ("fast_dllm_v2", "layer_types", ["full_attention", "sliding_attention"]),
            ("stable_diffcoder", "attention_bias", True),
            ("stable_diffcoder", "mlp_bias", True),
            ("stable_diffcoder", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
            ("llada", "activation_type", "swiglu"),
            ("llada", "block_type", "sequential"),
            ("llada", "block_group_size", 2),
            ("llada", "layer_norm_type", "default"),
            ("llada", "layer_norm_with_affine", False),
            ("llada", "rope", False),
            ("llada", "alibi", True),
            ("llada", "attention_layer_norm", True),
            ("llada", "bias_for_layer_norm", True),
            ("llada", "include_bias", True),
            ("llada", "input_emb_norm", True),
            ("llada", "scale_logits", True),
            ("llada", "clip_qkv", 8.0),
        ],
    )
    def test_a_network_of_another_kind_is_refused_by_the_key_that_asks_for_it(
        self, published: Path, tmp_path: Path, name: str, key: str, value: object
    ) -> None:
        message = refusal(copy_of(published / name, tmp_path, **{key: value}), name)
        assert f"{key} must be " in message


def read(folder: Path, to: Path, name: str, **changes: Any) -> Any:
    facts: CheckpointFacts = read_checkpoint(copy_of(folder / name, to, **changes))
    return AutoModel.get(name).read_config(facts, ())


class TestConfigurations:
    @pytest.mark.parametrize(
        ("name", "qkv_bias", "qk_norm", "head_dim", "hidden_size"),
        [
            ("dream", True, False, 8, 32),
            ("diffucoder", True, False, 8, 32),
            ("fast_dllm_v2", True, False, 8, 32),
            ("dream_reasoner", False, True, 8, 24),
            ("stable_diffcoder", False, False, 8, 24),
            ("llada", False, False, 8, 32),
        ],
    )
    def test_the_shape_is_read(
        self, published: Path, tmp_path: Path, name: str, qkv_bias: bool, qk_norm: bool, head_dim: int,
        hidden_size: int,
    ) -> None:  # fmt: skip
        config = read(published, tmp_path, name)
        assert (config.qkv_bias, config.output_bias, config.qk_norm) == (qkv_bias, False, qk_norm)
        assert (config.head_dim, config.hidden_size, config.intermediate_size) == (head_dim, hidden_size, 20)
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
        assert (config.vocab_size, config.rms_norm_eps, config.rope_theta) == (VOCAB, 1e-5, 1e6)
        assert config.rope_in_float32 == (name == "llada")

    def test_a_reasoner_without_a_head_width_takes_the_one_of_its_class(
        self, published: Path, tmp_path: Path
    ) -> None:
        assert read(published, tmp_path, "dream_reasoner", head_dim=...).head_dim == 128
        assert "q_norm.weight is [8], must be [128]" in refusal(tmp_path, "dream_reasoner")

    def test_a_reasoners_bias_flag_means_all_four_projections(self, published: Path, tmp_path: Path) -> None:
        config = read(published, tmp_path, "dream_reasoner", attention_bias=True)
        assert (config.qkv_bias, config.output_bias) == (True, True)

    @pytest.mark.parametrize(
        ("changes", "field", "value"),
        [
            ({"n_kv_heads": None}, "num_kv_heads", 4),
            ({"n_kv_heads": None, "multi_query_attention": True}, "num_kv_heads", 1),
            ({"n_kv_heads": 2, "multi_query_attention": True}, "num_kv_heads", 2),
            ({"mlp_hidden_size": None, "mlp_ratio": 4}, "intermediate_size", 128),
            ({"mlp_hidden_size": 20, "mlp_ratio": 4}, "intermediate_size", 20),
            ({"embedding_size": 56}, "vocab_size", 56),
            ({"embedding_size": None}, "vocab_size", VOCAB),
            ({"include_qkv_bias": True}, "qkv_bias", True),
            ({"weight_tying": True}, "tie_word_embeddings", True),
            ({"rope_full_precision": False}, "rope_in_float32", False),
        ],
    )
    def test_lladas_keys_fall_back_as_its_own_code_does(
        self, published: Path, tmp_path: Path, changes: dict[str, Any], field: str, value: object
    ) -> None:
        assert getattr(read(published, tmp_path, "llada", **changes), field) == value

    def test_lladas_heads_must_fit_its_width(self, published: Path, tmp_path: Path) -> None:
        message = refusal(copy_of(published / "llada", tmp_path, n_heads=5, n_kv_heads=2), "llada")
        assert "n_heads (5) must divide d_model (32)" in message
        assert "n_heads (5) must be a multiple of n_kv_heads (2)" in message


class TestRotationInFloat32:
    def test_heads_are_rounded_once(self) -> None:
        heads = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
        rotation = RotaryEmbedding(8, 5e5).rotation(torch.arange(5) * 300, torch.float32)
        assert torch.equal(rotate(heads, rotation), rotate(heads.float(), rotation).bfloat16())

    def test_llada_asks_for_it_and_dream_for_the_dtype_of_the_model(
        self, published: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[torch.dtype] = []
        rotation = RotaryEmbedding.rotation

        def noted(self: RotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype) -> Any:
            asked.append(dtype)
            return rotation(self, positions, dtype)

        monkeypatch.setattr(RotaryEmbedding, "rotation", noted)
        for name in ("llada", "dream"):
            model = load(published / name, name, dtype=torch.bfloat16)
            ids = torch.arange(6) + MASK_ID
            (logits,) = PagedRun(model).logits([Part(0, ids, torch.full((6,), 6))])
            assert logits.dtype == torch.bfloat16
        assert asked == [torch.float32, torch.bfloat16]
