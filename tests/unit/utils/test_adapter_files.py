from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.utils.adapter_files import AdapterError, Targets, read_adapter
from diffulex.utils.checkpoint import CheckpointError
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_random_sdar

if TYPE_CHECKING:
    from pathlib import Path

Q0 = "model.layers.0.self_attn.q_proj"
LLADA = "model.transformer.blocks.11.attn_out"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_sdar(tmp_path_factory.mktemp("model"))


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder)
    return str(caught.value)


class TestTargets:
    @pytest.mark.parametrize(
        ("targets", "module", "covered"),
        [
            (Targets(("q_proj", "v_proj")), Q0, True),
            (Targets(("k_proj",)), Q0, False),
            (Targets(("proj",)), Q0, False),
            (Targets(("self_attn.q_proj",)), Q0, True),
            (Targets((Q0,)), Q0, True),
            (Targets(("attn_out",)), LLADA, True),
            (Targets(("lm_head",)), "lm_head", True),
            (Targets(r".*\.q_proj"), Q0, True),
            (Targets(r"q_proj"), Q0, False),
            (Targets(r".*\.(q|k)_proj"), Q0 + "x", False),
            (Targets("all-linear"), Q0, True),
            (Targets("all-linear", exclude=("q_proj",)), Q0, False),
            (Targets(("q_proj",), exclude=r".*layers\.0\..*"), Q0, False),
            (Targets(("q_proj",), exclude=("layers.1.self_attn.q_proj",)), Q0, True),
            (Targets(("q_proj",), layers=(0, 2)), Q0, True),
            (Targets(("q_proj",), layers=(1,)), Q0, False),
            (Targets(("attn_out",), layers=(11,)), LLADA, True),
            (Targets(("attn_out",), layers=(1,)), LLADA, False),
            (Targets(("attn_out",), layers=(11,), layers_patterns=("layers",)), LLADA, False),
            (Targets(("attn_out",), layers=(11,), layers_patterns=("layers", "blocks")), LLADA, True),
            (Targets(("lm_head",), layers=(0,)), "lm_head", False),
        ],
    )
    def test_names_patterns_and_layers(self, targets: Targets, module: str, covered: bool) -> None:
        assert targets.covers(module) == covered


class TestScale:
    def test_alpha_over_rank_is_the_scale(self, model: Path, tmp_path: Path) -> None:
        facts = read_adapter(write_adapter(tmp_path, model, rank=4, lora_alpha=6))
        assert (facts.rank_of(Q0), facts.scale_of(Q0)) == (4, 1.5)

    def test_rslora_divides_by_the_root(self, model: Path, tmp_path: Path) -> None:
        facts = read_adapter(write_adapter(tmp_path, model, rank=3, lora_alpha=6, use_rslora=True))
        assert facts.scale_of(Q0) == pytest.approx(6 / math.sqrt(3))

    def test_patterns_change_rank_and_alpha_of_modules_whose_path_ends_so(
        self, model: Path, tmp_path: Path
    ) -> None:
        facts = read_adapter(
            write_adapter(
                tmp_path,
                model,
                rank=4,
                lora_alpha=8,
                rank_pattern={"v_proj": 2, r"layers\.1\.self_attn\.[qk]_proj": 16, "q_proj": 5},
                alpha_pattern={f"^{Q0}": 3, "proj": 99, "v_proj": 1},
                use_rslora=True,
            )
        )
        assert [facts.rank_of(f"model.layers.{i}.self_attn.{p}_proj") for i in (0, 1) for p in "qkvo"] == [
            5, 4, 2, 4, 16, 16, 2, 4,
        ]  # fmt: skip
        assert facts.scale_of(Q0) == pytest.approx(3 / math.sqrt(5))
        assert facts.scale_of("model.layers.1.self_attn.v_proj") == pytest.approx(1 / math.sqrt(2))
        assert facts.scale_of("model.layers.1.self_attn.q_proj") == 2


class TestReading:
    @pytest.mark.parametrize("adapter_name", ["", "default", "some_name"])
    def test_tensors_are_found_with_and_without_the_adapters_name(
        self, adapter_name: str, model: Path, tmp_path: Path
    ) -> None:
        facts = read_adapter(write_adapter(tmp_path, model, ["q_proj"], adapter_name=adapter_name))
        assert set(facts.tensors) == {Q0, Q0.replace("0", "1")}
        middle = f".{adapter_name}" if adapter_name else ""
        assert facts.tensors[Q0] == {
            side: f"base_model.model.{Q0}.lora_{side}{middle}.weight" for side in "AB"
        }
        assert (facts.strange, facts.base) == ((), "somebody/some-base")

    def test_target_modules_may_be_one_text(self, model: Path, tmp_path: Path) -> None:
        facts = read_adapter(write_adapter(tmp_path, model, target_modules=r".*\.[qkvo]_proj"))
        assert facts.targets.covers(Q0)
        assert not facts.targets.is_open
        assert read_adapter(write_adapter(tmp_path, model, target_modules="all-linear")).targets.is_open

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("use_dora", True),
            ("modules_to_save", ["lm_head"]),
            ("bias", "all"),
            ("bias", "lora_only"),
            ("fan_in_fan_out", True),
            ("lora_bias", True),
            ("layer_replication", [[0, 2]]),
            ("target_parameters", ["experts.gate_up_proj"]),
            ("trainable_token_indices", [1]),
            ("peft_type", "LOHA"),
            ("peft_type", None),
            ("init_lora_weights", "pissa_niter_4"),
            ("r", 0),
            ("r", None),
            ("r", 2.5),
            ("lora_alpha", "8"),
            ("lora_alpha", None),
            ("rank_pattern", {"q_proj": 0}),
            ("rank_pattern", ["q_proj"]),
            ("alpha_pattern", {"q_proj": None}),
            ("target_modules", None),
            ("target_modules", []),
            ("target_modules", [1]),
            ("target_modules", "(q_proj"),
            ("rank_pattern", {"(q": 2}),
            ("layers_to_transform", "all"),
            ("exclude_modules", 3),
        ],
    )
    def test_what_is_not_supported_is_refused_by_its_key(
        self, key: str, value: Any, model: Path, tmp_path: Path
    ) -> None:
        text = refusal(write_adapter(tmp_path, model, **{key: value}))
        assert text.startswith(f"{tmp_path / 'adapter_config.json'} cannot be used: {key}")
        assert "must be" in text

    def test_all_problems_are_named_together(self, model: Path, tmp_path: Path) -> None:
        text = refusal(write_adapter(tmp_path, model, use_dora=True, bias="all", r=-1))
        assert all(f"{key} must be" in text for key in ("use_dora", "bias", "r"))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("modules_to_save", []),
            ("use_dora", None),
            ("bias", None),
            ("init_lora_weights", "gaussian"),
            ("base_model_name_or_path", None),
            ("loftq_config", {}),
            ("task_type", "CAUSAL_LM"),
            ("lora_dropout", 0.5),
        ],
    )
    def test_what_changes_nothing_is_taken(self, key: str, value: Any, model: Path, tmp_path: Path) -> None:
        assert read_adapter(write_adapter(tmp_path, model, **{key: value})).rank == 3

    def test_missing_files_are_named(self, model: Path, tmp_path: Path) -> None:
        assert "'nowhere'" in refusal("nowhere")  # type: ignore[arg-type]
        assert "has no adapter_config.json" in refusal(tmp_path)
        write_adapter(tmp_path, model)
        (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
        assert "has no adapter_model.safetensors; convert adapter_model.bin to it" in refusal(tmp_path)

    def test_a_truncated_file_is_named(self, model: Path, tmp_path: Path) -> None:
        path = write_adapter(tmp_path, model) / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is truncated or damaged"):
            read_adapter(tmp_path)

    def test_a_config_that_is_no_json_is_named(self, model: Path, tmp_path: Path) -> None:
        path = write_adapter(tmp_path, model) / "adapter_config.json"
        path.write_text("{")
        with pytest.raises(CheckpointError, match=r"adapter_config.json is not valid JSON"):
            read_adapter(tmp_path)
        path.write_text(json.dumps([1]))
        with pytest.raises(CheckpointError, match="must hold a JSON object"):
            read_adapter(tmp_path)
