from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.model.loader import load_model
from diffulex.utils.checkpoint import CheckpointError, read_checkpoint
from tests.support.checkpoints import write_random_sdar
from tests.support.paged import PagedRun, Part, load

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.model.decoder import DiffusionLM

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_sdar(tmp_path / "model", 40, mask_id=3, eos_ids=(5,))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add, or with None remove tensors."""
    weights = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors")


def shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(halves.values()):
        save_file({name: weights[name] for name in halves if halves[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": halves}))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    return str(caught.value)


def logits_of(model: DiffusionLM) -> torch.Tensor:
    ids = torch.arange(12) % 40
    return PagedRun(model).logits([Part(0, ids, torch.full((12,), 12))])[0]


class TestLoading:
    def test_shards_give_the_same_model_as_one_file(self, folder: Path) -> None:
        expected = logits_of(load(folder))
        shard(folder)
        assert torch.equal(logits_of(load(folder)), expected)

    def test_attributes_describe_the_network(self, folder: Path) -> None:
        model = load(folder)
        assert (model.num_layers, model.num_kv_heads, model.head_dim) == (2, 1, 8)
        assert (model.vocab_size, model.hidden_size, model.dtype) == (40, 16, torch.float32)
        assert len(model.attention_layers()) == 2
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_weights_are_cast_to_the_asked_type(self, folder: Path, dtype: torch.dtype) -> None:
        expected = logits_of(load(folder))
        model = load(folder, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert logits_of(model).dtype == dtype
        worst = float((logits_of(model).float() - expected).abs().max() / expected.abs().max())
        assert 0 < worst < 0.05

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_files_of_every_float_type_are_read(self, folder: Path, dtype: torch.dtype) -> None:
        expected = {name: w.to(dtype).float() for name, w in load_file(folder / "model.safetensors").items()}
        edit_weights(folder, **{name: w.to(dtype) for name, w in expected.items()})
        weight = load(folder).layers[1].attention.output.weight
        assert torch.equal(weight, expected["model.layers.1.self_attn.o_proj.weight"])

    def test_given_embeddings_replace_those_of_the_ids(self, folder: Path) -> None:
        model = load(folder)
        run = PagedRun(model)
        ids, ends = torch.arange(6), torch.full((6,), 6)
        expected = run.logits([Part(0, ids, ends)])[0]
        with torch.inference_mode():
            hidden = model(torch.zeros_like(ids), torch.arange(6), model.embedding(ids))
        assert torch.equal(model.compute_logits(hidden), expected)

    def test_rotary_buffers_of_old_checkpoints_are_left_out(self, folder: Path) -> None:
        expected = logits_of(load(folder))
        edit_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
        assert torch.equal(logits_of(load(folder)), expected)

    def test_loading_reports_size_and_time(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="diffulex"):
            load(folder)
        assert any("loaded sdar from" in message for message in caplog.messages)

    def test_a_progress_bar_runs_to_the_end_on_standard_error(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        facts = read_checkpoint(folder)
        settings: Any = SimpleNamespace(model_name="sdar", checkpoint=facts, mask_token_id=3)
        load_model(settings, torch.device("cpu"), torch.float32, show_progress=True)
        shown = capsys.readouterr()
        assert "loading weights" in shown.err
        assert "100%" in shown.err
        assert shown.out == ""


class TestHead:
    def test_a_tied_head_may_be_absent(self, folder: Path) -> None:
        edit_config(folder, tie_word_embeddings=True)
        edit_weights(folder, **{"lm_head.weight": None})
        model = load(folder)
        assert model.head.weight is model.embedding.weight
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        edit_config(folder, tie_word_embeddings=False)
        edit_weights(folder, **{"lm_head.weight": embedding})
        torch.testing.assert_close(logits_of(model), logits_of(load(folder)))

    def test_a_head_in_the_file_wins_over_tying(self, folder: Path) -> None:
        expected = logits_of(load(folder))
        edit_config(folder, tie_word_embeddings=True)
        assert torch.equal(logits_of(load(folder)), expected)

    def test_an_untied_head_that_is_absent_is_missing(self, folder: Path) -> None:
        edit_weights(folder, **{"lm_head.weight": None})
        assert "1 missing: lm_head.weight" in refusal(folder)


class TestRefusals:
    def test_missing_unused_misshapen_and_unreadable_names_come_together(self, folder: Path) -> None:
        edit_weights(
            folder,
            **{
                "model.norm.weight": None,
                "model.layers.0.mlp.up_proj.weight": None,
                "model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16),
                "model.layers.0.self_attn.q_proj.bias": torch.zeros(16),
                Q_PROJ: torch.zeros(16, 15),
                "lm_head.weight": torch.zeros(40, 16, dtype=torch.int8),
            },
        )
        message = refusal(folder)
        assert "2 missing: model.layers.0.mlp.up_proj.weight, model.norm.weight" in message
        assert "2 unused: model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight" in message
        assert f"1 misshapen: {Q_PROJ} is [16, 15], must be [16, 16]" in message
        assert "lm_head.weight is I8" in message

    def test_names_are_compared_before_weights_are_read(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(_: object) -> None:
            raise AssertionError("weights were read")

        monkeypatch.setattr("diffulex.model.loader.iter_weights", never)
        edit_weights(folder, **{"model.norm.weight": None})
        assert "1 missing: model.norm.weight" in refusal(folder)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite_are_refused_by_name(self, folder: Path, value: float) -> None:
        weight = load_file(folder / "model.safetensors")[Q_PROJ]
        weight[3, 4] = weight[5, 6] = value
        edit_weights(folder, **{Q_PROJ: weight})
        message = refusal(folder)
        assert message.startswith(f"{Q_PROJ} in {folder / 'model.safetensors'} holds 2 values")

    def test_values_that_overflow_the_asked_type_are_refused(self, folder: Path) -> None:
        weight = load_file(folder / "model.safetensors")[Q_PROJ]
        weight[3, 4] = 1e5
        edit_weights(folder, **{Q_PROJ: weight})
        assert bool(torch.isfinite(logits_of(load(folder))).all())
        assert "not finite as torch.float16" in refusal(folder, dtype=torch.float16)

    def test_large_finite_values_are_no_reason_to_refuse(self, folder: Path) -> None:
        edit_weights(folder, **{Q_PROJ: torch.full((16, 16), 3e38)})
        assert float(load(folder).layers[1].attention.qkv.weight.max()) == pytest.approx(3e38)

    def test_a_truncated_shard_is_refused_by_name(self, folder: Path) -> None:
        shard(folder)
        file = folder / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        assert refusal(folder).startswith(f"{file} is truncated or damaged")

    @pytest.mark.parametrize(
        ("model_type", "architectures"),
        [("llada", ["LLaDAModelLM"]), ("Dream", ["DreamModel"]), ("qwen3", None)],
    )
    def test_a_checkpoint_of_another_family_is_refused(
        self, folder: Path, model_type: str, architectures: list[str] | None
    ) -> None:
        edit_config(folder, model_type=model_type, architectures=architectures)
        message = refusal(folder)
        assert "is no sdar checkpoint" in message
        assert repr(model_type) in message
        assert "set model_name" in message

    @pytest.mark.parametrize(
        "changes",
        [{"model_type": None}, {"architectures": None}, {"model_type": None, "architectures": None}],
    )
    def test_a_family_that_is_half_stated_or_unstated_is_accepted(
        self, folder: Path, changes: dict[str, None]
    ) -> None:
        edit_config(folder, **changes)
        assert load(folder).num_layers == 2

    def test_an_unknown_model_name_lists_the_known_ones(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"no model 'sdra'.*sdar"):
            load(folder, model_name="sdra")

    @pytest.mark.parametrize("mask_token_id", [40, 151669, -1])
    def test_a_mask_id_outside_the_vocabulary_is_refused(self, folder: Path, mask_token_id: int) -> None:
        facts = read_checkpoint(folder)
        settings: Any = SimpleNamespace(model_name="sdar", checkpoint=facts, mask_token_id=mask_token_id)
        with pytest.raises(
            CheckpointError, match=rf"mask_token_id \({mask_token_id}\) must be below .* \(40\)"
        ):
            load_model(settings, torch.device("cpu"), torch.float32)
