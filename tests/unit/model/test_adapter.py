"""Adapters on a random network: beside the weights, merged, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.model.adapter import read_pairs
from diffulex.utils.adapter_files import AdapterError, read_adapter
from tests.golden.cases import DATA
from tests.support.adapters import ATTENTION, edit_tensors, linear_modules, write_adapter
from tests.support.checkpoints import write_random_sdar
from tests.support.paged import PagedRun, Part, load

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.model.decoder import DiffusionLM

ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
Q0 = "model.layers.0.self_attn.q_proj"
K1 = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_sdar(tmp_path / "model", 40, mask_id=3, eos_ids=(5,), scale=0.2)


def logits_of(model: DiffusionLM) -> torch.Tensor:
    ids = torch.arange(12) * 7 % 40
    return PagedRun(model).logits([Part(0, ids, torch.full((12,), 12))])[0]


def merged_by_hand(model: Path, adapter: Path, target: Path) -> Path:
    """The checkpoint with ``scale * B @ A`` in its weights, computed in float64."""
    facts = read_adapter(adapter)
    shutil.copytree(model, target)
    weights, tensors = load_file(target / "model.safetensors"), load_file(facts.weight_file)
    for module, names in facts.tensors.items():
        delta = tensors[names["B"]].double() @ tensors[names["A"]].double() * facts.scale_of(module)
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + delta).float()
    save_file(weights, target / "model.safetensors")
    return target


def refusal(model: Path, adapter: Path, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        load(model, adapter=adapter, **options)
    return str(caught.value)


class TestApplying:
    @pytest.mark.parametrize(
        ("names", "options"),
        [
            (ATTENTION, {}),
            (ALL, {}),
            (("v_proj", "down_proj"), {}),
            (ALL, {"use_rslora": True, "adapter_name": "default"}),
            (
                ATTENTION,
                {"ranks": {"v_proj": 5}, "rank_pattern": {"v_proj": 5}, "alpha_pattern": {"q_proj": 1}},
            ),
            (ALL, {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"}),
            (ALL, {"target_modules": "all-linear"}),
            ((*ATTENTION, "lm_head"), {}),
        ],
    )
    def test_beside_and_merged_equal_the_checkpoint_with_the_adapter_in_its_weights(
        self, names: tuple[str, ...], options: dict[str, Any], model: Path, tmp_path: Path
    ) -> None:
        if "lm_head" in names:
            # The head has no module above it, as the names of the others have.
            weights = load_file(model / "model.safetensors")
            adapter = write_adapter(tmp_path / "adapter", model, ATTENTION, target_modules=list(names))
            edit_tensors(
                adapter,
                **{
                    "lm_head.lora_A.weight": torch.randn(3, weights["lm_head.weight"].shape[1]),
                    "lm_head.lora_B.weight": torch.randn(40, 3),
                },
            )
        else:
            adapter = write_adapter(tmp_path / "adapter", model, names, **options)
        expected = logits_of(load(merged_by_hand(model, adapter, tmp_path / "merged")))
        assert float((expected - logits_of(load(model))).abs().max()) > 0.1
        for merge in (False, True):
            actual = logits_of(load(model, adapter=adapter, merge=merge))
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)

    def test_a_merged_weight_is_rounded_once(self, model: Path, tmp_path: Path) -> None:
        """A base in bfloat16 with a small adapter: the sum keeps what bfloat16 addition would lose."""
        weights = {n: w.bfloat16() for n, w in load_file(model / "model.safetensors").items()}
        save_file(weights, model / "model.safetensors")
        adapter = write_adapter(tmp_path / "adapter", model, ["q_proj"], lora_alpha=0.01)
        found = load(model, dtype=torch.bfloat16, adapter=adapter, merge=True)
        tensors = load_file(adapter / "adapter_model.safetensors")
        a, b = (tensors[f"base_model.model.{Q0}.lora_{side}.weight"] for side in "AB")
        expected = (weights[f"{Q0}.weight"].float() + b @ a * (0.01 / 3)).bfloat16()
        layer = found.decoder_layers()[0]
        torch.testing.assert_close(layer.attention.qkv.weight[:16], expected, atol=0, rtol=0)

    def test_an_adapter_on_some_layers_leaves_the_others_alone(self, model: Path, tmp_path: Path) -> None:
        adapter = write_adapter(tmp_path / "adapter", model, ["q_proj"], layers_to_transform=[1])
        edit_tensors(adapter, **{f"{Q0}.lora_{side}.weight": None for side in "AB"})
        first, second = load(model, adapter=adapter).decoder_layers()
        assert first.attention.qkv.lora is None
        assert second.attention.qkv.lora is not None

    def test_a_model_without_an_adapter_has_no_branches(self, model: Path) -> None:
        assert not [name for name, _ in load(model).named_modules() if name.endswith("lora")]


class TestFamiliesWithExperts:
    """Fused projections under the checkpoint's one name, and experts, which only merging reaches."""

    @pytest.mark.parametrize(
        ("family", "case", "names"),
        [
            ("sdar_moe", "moe_norm_true", ATTENTION),
            ("llada2_mini", "grouped", ("query_key_value", "dense")),
            ("llada2_mini", "grouped", ("query_key_value",)),
        ],
    )
    def test_attention_has_its_adapter_beside_and_merged(
        self, family: str, case: str, names: tuple[str, ...], tmp_path: Path
    ) -> None:
        base = DATA / family / case
        adapter = write_adapter(tmp_path / "adapter", base, names)
        expected = logits_of(load(merged_by_hand(base, adapter, tmp_path / "merged"), family))
        assert float((expected - logits_of(load(base, family))).abs().max()) > 0.1
        for merge in (False, True):
            actual = logits_of(load(base, family, adapter=adapter, merge=merge))
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)

    def test_experts_have_their_adapter_merged_or_not_at_all(self, tmp_path: Path) -> None:
        base, names = DATA / "sdar_moe" / "moe_norm_true", ("gate_proj", "down_proj", "q_proj")
        adapter = write_adapter(tmp_path / "adapter", base, names)
        text = refusal(base, adapter, model_name="sdar_moe")
        assert "take no adapter beside their weights (write pre_merge_lora=True): " in text
        assert "model.layers.0.mlp.experts.0.gate_proj" in text
        assert "q_proj" not in text
        expected = logits_of(load(merged_by_hand(base, adapter, tmp_path / "merged"), "sdar_moe"))
        actual = logits_of(load(base, "sdar_moe", adapter=adapter, merge=True))
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


class TestFitting:
    def test_an_adapter_of_another_width_names_its_tensors(self, model: Path, tmp_path: Path) -> None:
        other = write_random_sdar(tmp_path / "other", 40, hidden_size=32, num_key_value_heads=2)
        text = refusal(model, write_adapter(tmp_path / "adapter", other))
        assert "12 tensors are of another shape" in text
        assert f"base_model.model.{Q0}.lora_A.weight is [3, 32], must be [3, 16]" in text
        assert f"base_model.model.{K1}.lora_B.weight is [16, 3], must be [8, 3]" in text
        assert "the adapter says it was made for 'somebody/some-base'" in text
        assert "o_proj.lora_A" not in text

    def test_an_adapter_of_a_deeper_base_names_the_tensors_without_a_module(
        self, model: Path, tmp_path: Path
    ) -> None:
        other = write_random_sdar(tmp_path / "other", 40, num_hidden_layers=3)
        text = refusal(model, write_adapter(tmp_path / "adapter", other))
        assert "8 tensors fit no linear layer of this model: " in text
        for name in ATTENTION:
            for side in "AB":
                assert f"base_model.model.model.layers.2.self_attn.{name}.lora_{side}.weight" in text
        assert "layers.1" not in text

    def test_an_adapter_of_a_shallower_base_names_the_modules_without_tensors(
        self, model: Path, tmp_path: Path
    ) -> None:
        other = write_random_sdar(tmp_path / "other", 40, num_hidden_layers=1)
        text = refusal(model, write_adapter(tmp_path / "adapter", other, ["q_proj", "k_proj"]))
        assert (
            f"2 modules are targets of the adapter and have no tensors: {Q0.replace('0', '1')}, {K1}" in text
        )

    def test_an_adapter_of_another_family_changes_no_module(self, model: Path, tmp_path: Path) -> None:
        adapter = write_adapter(tmp_path / "adapter", model, ["q_proj"], target_modules=["attn_out"])
        path = adapter / "adapter_model.safetensors"
        renamed = {
            name.replace("layers", "transformer.blocks").replace("self_attn.q_proj", "attn_out"): tensor
            for name, tensor in load_file(path).items()
        }
        save_file(renamed, path)
        for merge in (False, True):
            text = refusal(model, adapter, merge=merge)
            assert "it changes no module of this model" in text
            assert all(name in text for name in renamed)

    def test_targets_without_tensors_and_tensors_without_targets_are_both_named(
        self, model: Path, tmp_path: Path
    ) -> None:
        adapter = write_adapter(tmp_path / "adapter", model, ["q_proj"], target_modules=["v_proj", "o_proj"])
        text = refusal(model, adapter)
        assert "4 modules are targets of the adapter and have no tensors" in text
        assert "2 modules have tensors and are no targets: " + Q0 in text

    def test_half_a_pair_is_named(self, model: Path, tmp_path: Path) -> None:
        adapter = write_adapter(tmp_path / "adapter", model)
        edit_tensors(adapter, **{f"{K1}.lora_B.weight": None})
        assert f"1 modules have only one of lora_A and lora_B: {K1};" in refusal(model, adapter)

    def test_tensors_of_another_kind_are_named(self, model: Path, tmp_path: Path) -> None:
        adapter = write_adapter(tmp_path / "adapter", model)
        strange = {
            "model.embed_tokens.lora_embedding_A": torch.zeros(3, 40),
            f"{Q0}.lora_magnitude_vector": torch.zeros(16),
            f"{Q0}.lora_A.second.weight": torch.zeros(3, 16),
            "model.norm.lora_A.weight": torch.zeros(3, 16),
        }
        edit_tensors(adapter, **strange)
        text = refusal(model, adapter)
        assert "4 tensors fit no linear layer of this model" in text
        assert all(f"base_model.model.{name}" in text for name in list(strange)[:2] + list(strange)[3:])

    def test_another_rank_than_the_config_says_is_named(self, model: Path, tmp_path: Path) -> None:
        adapter = write_adapter(tmp_path / "adapter", model, rank=3, rank_pattern={"k_proj": 4})
        text = refusal(model, adapter)
        assert "4 tensors are of another shape" in text
        assert f"base_model.model.{K1}.lora_A.weight is [3, 16], must be [4, 16]" in text

    def test_whole_numbers_and_values_that_are_not_finite_are_refused(
        self, model: Path, tmp_path: Path
    ) -> None:
        adapter = write_adapter(tmp_path / "adapter", model)
        edit_tensors(adapter, **{f"{Q0}.lora_A.weight": torch.full((3, 16), torch.nan)})
        assert f"not finite: base_model.model.{Q0}.lora_A.weight" in refusal(model, adapter)
        edit_tensors(adapter, **{f"{Q0}.lora_A.weight": torch.ones(3, 16, dtype=torch.int8)})
        assert f"base_model.model.{Q0}.lora_A.weight is I8" in refusal(model, adapter)

    def test_a_tied_head_takes_no_adapter(self, tmp_path: Path) -> None:
        tied = write_random_sdar(tmp_path / "tied", 40, tie_word_embeddings=True)
        weights = load_file(tied / "model.safetensors")
        weights.pop("lm_head.weight")
        save_file(weights, tied / "model.safetensors")
        adapter = write_adapter(tmp_path / "adapter", tied, ["q_proj"], target_modules=["q_proj", "lm_head"])
        edit_tensors(
            adapter,
            **{"lm_head.lora_A.weight": torch.ones(3, 16), "lm_head.lora_B.weight": torch.ones(40, 3)},
        )
        assert "fit no linear layer of this model: base_model.model.lm_head.lora_A" in refusal(tied, adapter)

    def test_weights_without_a_place_beside_them_ask_for_merging(self, model: Path, tmp_path: Path) -> None:
        adapter = read_adapter(write_adapter(tmp_path / "adapter", model, ["q_proj"]))
        slots = load(model).weight_slots()
        object.__setattr__(slots[f"{Q0}.weight"], "adapt", None)
        with pytest.raises(AdapterError, match=r"1 modules take no .* \(write pre_merge_lora=True\): " + Q0):
            read_pairs(adapter, slots, beside=True)
        assert set(read_pairs(adapter, slots, beside=False)) == {
            f"{module}.weight" for module in linear_modules(model, ["q_proj"])
        }

    def test_no_weight_is_read_before_the_adapter_fits(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter = write_adapter(tmp_path / "adapter", model, target_modules=["v_proj"])
        monkeypatch.setattr("diffulex.model.loader.iter_weights", lambda _: pytest.fail("weights were read"))
        assert "are no targets" in refusal(model, adapter)
        assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == ["v_proj"]
