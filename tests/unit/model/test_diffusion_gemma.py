"""Loading DiffusionGemma checkpoints: configuration, names of tensors, refusals, cache shapes, two ranks."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from diffulex.attention.layer import KVShape
from diffulex.config import Config, ConfigError
from diffulex.distributed.state import ParallelState
from diffulex.engine.model_runner import MultiBlockModelRunnerTemplate
from diffulex.model.diffusion_gemma import DiffusionGemmaLM
from diffulex.model.diffusion_gemma_config import DiffusionGemmaConfig, read_gemma_config
from diffulex.model.loader import load_model, outline
from diffulex.moe.block import use_forms
from diffulex.strategy.multi_bd.attention.metadata import SLOT
from diffulex.utils.checkpoint import CheckpointError, read_checkpoint
from tests.golden.cases import DATA
from tests.support.canvas import CanvasRun, Rows, load_gemma
from tests.support.checkpoints import write_random_sdar
from tests.support.configs import make_checkpoint, make_config
from tests.support.gemma_reference import VOCAB, make_reference, save_reference

if TYPE_CHECKING:
    from pathlib import Path

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
GATE = "layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(make_reference(1), tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def edit_config(folder: Path, top: dict[str, Any] | None = None, **text: Any) -> None:
    """Changes in `text_config`, and in `top` beside it; None removes a key."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **(top or {})}
    inner = {**content["text_config"], **text}
    content["text_config"] = {key: value for key, value in inner.items() if value is not None}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors")


def rename(folder: Path, *, keep: bool = False) -> None:
    """Shared tensors get the encoder's names; with `keep` beside the decoder's."""
    weights = load_file(folder / "model.safetensors")
    shared = {
        name: weight
        for name, weight in weights.items()
        if name.startswith(DECODER) and "self_conditioning" not in name and "layer_scalar" not in name
    }
    renamed = {name.replace(DECODER, ENCODER): weight.clone() for name, weight in shared.items()}
    kept = weights if keep else {name: w for name, w in weights.items() if name not in shared}
    save_file({**kept, **renamed}, folder / "model.safetensors")


def shape_of(folder: Path, names: tuple[str, ...] = ()) -> DiffusionGemmaConfig:
    return read_gemma_config(read_checkpoint(folder), names)


def answers(model: DiffusionGemmaLM) -> torch.Tensor:
    """Conditioned logits of a canvas behind a text; every weight takes part."""
    draw = torch.Generator().manual_seed(0)
    text, canvas = (torch.randint(0, VOCAB, (n,), generator=draw) for n in (9, 8))
    run = CanvasRun(model, page_size=4, num_pages=5)
    run.encode([(0, text, 0)])
    first = run.denoise([(0, canvas, 9)])
    return run.denoise([(0, canvas, 9)], first)[0]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_gemma(folder)
    return str(caught.value)


class TestConfig:
    def test_both_spellings_of_what_full_layers_change_give_the_same_shape(self, folder: Path) -> None:
        written = json.loads((folder / "config.json").read_text())["text_config"]
        assert written["per_layer_config"] == {"1": {"head_dim": 8, "num_key_value_heads": 1}}
        expected = shape_of(folder)
        edit_config(folder, per_layer_config=None, global_head_dim=8, num_global_key_value_heads=1)
        assert shape_of(folder) == expected
        assert [(one.window, one.num_kv_heads, one.head_dim) for one in expected.layers] == [
            (6, 2, 4), (None, 1, 8),
        ]  # fmt: skip

    def test_full_layers_without_their_own_keys_have_wide_heads_and_the_shared_number(
        self, folder: Path
    ) -> None:
        edit_config(folder, per_layer_config=None)
        full = shape_of(folder).layers[1]
        assert (full.num_kv_heads, full.head_dim) == (2, 512)

    def test_a_proportional_rotation_turns_the_stated_part_of_the_frequencies(self, folder: Path) -> None:
        edit_config(
            folder,
            per_layer_config=None,
            global_head_dim=512,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                },
            },
        )  # fmt: skip
        assert [one.rope for one in shape_of(folder).layers] == [(4, 1e4, 2), (512, 1e6, 64)]

    def test_every_sixth_and_the_last_layer_see_everything_by_default(self, folder: Path) -> None:
        edit_config(folder, layer_types=None, num_hidden_layers=8, per_layer_config=None)
        windows = [one.window for one in shape_of(folder).layers]
        assert windows == [6, 6, 6, 6, 6, None, 6, None]

    def test_the_last_layer_sees_everything_whatever_is_stated(self, folder: Path) -> None:
        edit_config(folder, layer_types=["sliding_attention"] * 2)
        assert [one.window for one in shape_of(folder).layers] == [6, None]

    def test_everything_that_is_wrong_is_listed_with_its_place(self, folder: Path) -> None:
        edit_config(
            folder,
            {"tie_word_embeddings": False},
            hidden_size=None,
            hidden_activation="silu",
            attention_bias=True,
            use_bidirectional_attention="all",
            top_k_experts=9,
            num_attention_heads=5,
            per_layer_config={"7": {}, "1": {"head_dim": 5, "sliding_window": 3}},
            rope_parameters={
                "sliding_attention": {"rope_type": "yarn"},
                "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 2.0},
            },
        )
        with pytest.raises(CheckpointError) as caught:
            shape_of(folder)
        for problem in (
            "tie_word_embeddings must be True, it is False",
            "text_config.hidden_size must be a positive whole number, it is absent",
            "text_config.hidden_activation must be 'gelu_pytorch_tanh', it is 'silu'",
            "text_config.attention_bias must be False, it is True",
            "text_config.use_bidirectional_attention must be 'vision', it is 'all'",
            "top_k_experts (9) must not exceed num_experts (3)",
            "num_attention_heads (5) must be a multiple of the 2 key/value heads of layer 0",
            "per_layer_config has an entry '7', which is no layer of 2",
            "per_layer_config of layer 1 sets sliding_window, which is not read",
            "head_dim of layer 1 must be even, it is 5",
            "rope_parameters.sliding_attention.rope_type must be default or proportional, it is 'yarn'",
            "rope_parameters.sliding_attention.rope_theta must be a positive number, it is absent",
            "rope_parameters.full_attention.factor must be 1.0, it is 2.0",
            "rope_parameters.full_attention.partial_rotary_factor must be 1.0, it is 0.5",
        ):
            assert problem in str(caught.value)

    @pytest.mark.parametrize("broken", [None, "text", ["a"]])
    def test_a_file_without_a_text_part_is_refused(self, folder: Path, broken: object) -> None:
        content = {**json.loads((folder / "config.json").read_text()), "text_config": broken}
        (folder / "config.json").write_text(json.dumps({**content, "vocab_size": VOCAB}))
        assert "text_config must be a table" in refusal(folder)


class TestNames:
    def test_the_encoders_names_load_the_same_network(self, folder: Path) -> None:
        expected = answers(load_gemma(folder))
        rename(folder)
        names = load_file(folder / "model.safetensors").keys()
        assert f"{DECODER}{GATE}" not in names
        assert torch.equal(answers(load_gemma(folder)), expected)

    def test_both_names_may_stand_together_when_they_agree(self, folder: Path) -> None:
        expected = answers(load_gemma(folder))
        rename(folder, keep=True)
        assert torch.equal(answers(load_gemma(folder)), expected)

    @pytest.mark.parametrize("sick", [DECODER, ENCODER])
    @pytest.mark.parametrize("first", [DECODER, ENCODER])
    @pytest.mark.parametrize("name", [GATE, "embed_tokens.weight", "layers.1.experts.gate_up_proj"])
    def test_both_names_with_different_values_are_refused_in_either_order(
        self, folder: Path, sick: str, first: str, name: str
    ) -> None:
        rename(folder, keep=True)
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        weights[f"{sick}{name}"].view(-1)[3] += 0.01
        early = {key: w for key, w in weights.items() if key.startswith(first)}
        late = {key: w for key, w in weights.items() if key not in early}
        save_file(early, folder / "model-00001-of-00002.safetensors")
        save_file(late, folder / "model-00002-of-00002.safetensors")
        message = refusal(folder)
        assert f"{DECODER}{name} and {ENCODER}{name} must be the same tensor and they differ" in message

    def test_each_pass_has_factors_of_its_own(self, tmp_path: Path) -> None:
        # Norms hide a factor from the next layer's keys; it shows in those of the layer after that.
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        folder = save_reference(make_reference(4, num_hidden_layers=3, layer_types=kinds), tmp_path)
        expected = answers(load_gemma(folder))
        for prefix in (DECODER, ENCODER):
            name = f"{prefix}layers.0.layer_scalar"
            kept = load_file(folder / "model.safetensors")[name]
            edit_weights(folder, **{name: kept * 1.5})
            assert float((answers(load_gemma(folder)) - expected).abs().max()) > 1e-3
            edit_weights(folder, **{name: None})
            assert f"1 missing: {name}" in refusal(folder)
            edit_weights(folder, **{name: kept})

    def test_missing_unused_and_misshapen_names_come_together(self, folder: Path) -> None:
        edit_weights(
            folder,
            **{
                f"{DECODER}{GATE}": None,
                f"{DECODER}layers.1.self_attn.v_proj.weight": torch.zeros(8, 16),
                f"{DECODER}layers.0.experts.gate_up_proj": torch.zeros(3, 15, 16),
                "model.encoder.something": torch.zeros(2),
            },
        )
        message = refusal(folder)
        assert f"1 missing: {DECODER}{GATE}" in message
        assert f"2 unused: {DECODER}layers.1.self_attn.v_proj.weight, model.encoder.something" in message
        assert "layers.0.experts.gate_up_proj is [3, 15, 16], must be [3, 16, 16]" in message

    def test_the_image_part_is_left_out(self, folder: Path) -> None:
        names = load_file(folder / "model.safetensors").keys()
        assert any(name.startswith("model.encoder.vision_tower.") for name in names)
        assert any(name.startswith("model.encoder.embed_vision.") for name in names)
        slots = load_gemma(folder).weight_slots()
        assert not any("vision" in name for name in slots)

    def test_a_head_in_the_file_wins_over_tying(self, folder: Path) -> None:
        expected = answers(load_gemma(folder))
        head = load_file(folder / "model.safetensors")[f"{DECODER}embed_tokens.weight"].clone()
        edit_weights(folder, **{"lm_head.weight": head})
        torch.testing.assert_close(answers(load_gemma(folder)), expected)
        edit_weights(folder, **{"lm_head.weight": -head})
        assert float((answers(load_gemma(folder)) - expected).abs().max()) > 1

    @pytest.mark.parametrize("name", ["layers.1.router.per_expert_scale", "layers.0.experts.down_proj"])
    def test_values_that_are_not_finite_are_refused_by_name(self, folder: Path, name: str) -> None:
        weight = load_file(folder / "model.safetensors")[f"{DECODER}{name}"]
        weight.view(-1)[1] = torch.nan
        edit_weights(folder, **{f"{DECODER}{name}": weight})
        assert refusal(folder).startswith(f"{DECODER}{name} in {folder / 'model.safetensors'} holds 1 values")


class TestFamily:
    def test_checkpoints_of_other_families_are_refused_both_ways(self, folder: Path, tmp_path: Path) -> None:
        other = write_random_sdar(tmp_path / "sdar")
        assert "is no diffusion_gemma checkpoint" in refusal(other)
        settings: Any = SimpleNamespace(
            model_name="sdar", checkpoint=read_checkpoint(folder), mask_token_id=0
        )
        with pytest.raises(CheckpointError, match="is no sdar checkpoint"):
            load_model(settings, torch.device("cpu"), torch.float32)

    def test_decoding_is_refused_with_a_sentence_although_the_network_loads(self, folder: Path) -> None:
        assert load_gemma(folder).num_layers == 2
        with pytest.raises(ConfigError) as caught:
            Config(model=str(folder), model_name="diffusion_gemma")
        assert (
            "model_name='diffusion_gemma' with decoding_strategy='diffusion_gemma' is not available yet"
            in (str(caught.value))
        )

    def test_an_outline_needs_no_memory_and_states_every_shape(self, folder: Path) -> None:
        settings: Any = SimpleNamespace(
            model_name="diffusion_gemma", checkpoint=read_checkpoint(folder), mask_token_id=0
        )
        model = outline(settings)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        stored = load_file(folder / "model.safetensors")
        shapes = {name: slot.shape for name, slot in model.weight_slots().items()}
        assert shapes == {name: tuple(stored[name].shape) for name in stored if "vision" not in name}

    def test_the_embedding_factor_is_rounded_to_the_type_of_the_weights(self, folder: Path) -> None:
        edit_config(folder, hidden_size=12)
        config = shape_of(folder)
        assert DiffusionGemmaLM(config, dtype=torch.float32).embed_scale == pytest.approx(12**0.5, abs=1e-6)
        assert DiffusionGemmaLM(config, dtype=torch.bfloat16).embed_scale == 3.46875


class TestForward:
    def test_given_embeddings_are_used_as_they_are(self, saved: Path) -> None:
        model, ids = load_gemma(saved), torch.arange(6)
        run = CanvasRun(model)
        expected = run.forward([Rows(0, ids, canvas_start=0)])[0]
        with torch.inference_mode():
            embeds = model.input_embeds(ids, True, None)
            assert torch.equal(model(ids * 0, torch.arange(6), embeds, is_canvas=True), expected)

    def test_one_truth_for_all_rows_equals_a_truth_for_each(self, saved: Path) -> None:
        model, ids = load_gemma(saved), torch.arange(6)
        expected_embeds = model.expected_embeds(torch.randn(6, VOCAB))
        for is_canvas in (True, False):
            CanvasRun(model).forward([Rows(0, ids, canvas_start=0 if is_canvas else None)])
            each = torch.full((6,), is_canvas)
            with torch.inference_mode():
                one = model(ids, torch.arange(6), is_canvas=is_canvas, expected=expected_embeds)
                assert torch.equal(model(ids, torch.arange(6), is_canvas=each, expected=expected_embeds), one)

    def test_a_uniform_prediction_expects_the_mean_embedding(self, saved: Path) -> None:
        model = load_gemma(saved)
        with torch.inference_mode():
            rows = model.expected_embeds(torch.zeros(2, VOCAB))
            mean = model.embedding(torch.arange(VOCAB)).mean(dim=0) * 4  # hidden size 16
        torch.testing.assert_close(rows, mean.expand(2, -1))

    def test_experts_compute_the_same_through_every_dispatcher(self, saved: Path) -> None:
        model = load_gemma(saved)
        expected = answers(model)
        use_forms(model, "naive", "naive")
        assert torch.equal(answers(model), expected)

    def test_logits_stay_within_the_cap(self, saved: Path) -> None:
        model = load_gemma(saved)
        logits = model.compute_logits(torch.randn(3, 16) * 1e4)
        assert logits.dtype == torch.float32
        assert 29 < float(logits.abs().max()) <= 30


class GemmaRunner(MultiBlockModelRunnerTemplate):
    """The engine's runner around this network, under a configuration that is allowed."""

    attn_metadata = SLOT

    def load_model(self) -> DiffusionGemmaLM:
        return load_gemma(DATA / "diffusion_gemma" / "c16")


def test_each_layer_gets_a_cache_of_its_own_shape_and_all_are_paid_for(tmp_path: Path) -> None:
    config = make_config(make_checkpoint(tmp_path), page_size=16, block_size=8, num_pages=3, dtype="float32")
    runner = GemmaRunner(config, 0, [])
    layers = runner.model.attention_layers()
    assert [layer.kv_shape for layer in layers] == [KVShape(2, 8), KVShape(2, 8), KVShape(1, 16)]
    caches = [cache for layer in layers for cache in (layer.k_cache, layer.v_cache) if cache is not None]
    assert [tuple(cache.shape) for cache in caches[::2]] == [(3, 16, 2, 8), (3, 16, 2, 8), (3, 16, 1, 16)]
    assert runner.memory_plan.cache_bytes == sum(cache.numel() * 4 for cache in caches)
    runner.exit()


def _answers_of_rank(rank: int, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    settings: Any = SimpleNamespace(
        model_name="diffusion_gemma", checkpoint=read_checkpoint(folder), mask_token_id=0
    )
    model = load_model(settings, torch.device("cpu"), torch.float32, parallel=ParallelState(2, rank))
    assert isinstance(model, DiffusionGemmaLM)
    torch.save(answers(model), f"{out}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    folder = save_reference(make_reference(2, num_global_key_value_heads=2), tmp_path / "model")
    expected = answers(load_gemma(folder))
    mp.spawn(_answers_of_rank, args=(str(folder), str(tmp_path)), nprocs=2)
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"rank{rank}.pt"), expected, atol=1e-4, rtol=1e-4)


def test_heads_that_do_not_divide_are_refused_by_name(saved: Path) -> None:
    settings: Any = SimpleNamespace(
        model_name="diffusion_gemma", checkpoint=read_checkpoint(saved), mask_token_id=0
    )
    with pytest.raises(
        ValueError, match=r"key/value heads \(1\) must be divisible by the tensor parallel size"
    ):
        outline(settings, ParallelState(2))
