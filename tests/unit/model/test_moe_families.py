"""SDAR with experts and LLaDA2: what they read of config.json, where their tensors go, what they refuse."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.distributed.state import ParallelState
from diffulex.model.catalog import AutoModel
from diffulex.model.llada2 import Llada2LM
from diffulex.model.loader import outline
from diffulex.model.moe_decoder import MoeMLP
from diffulex.moe.experts import Experts
from diffulex.utils.checkpoint import CheckpointError, read_checkpoint
from tests.golden.cases import DATA
from tests.support.paged import PagedRun, Part, load
from tests.support.real_engines import greedy, make_engine

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.model.decoder import DiffusionLM

LLADA2, SDAR = DATA / "llada2_mini" / "grouped", DATA / "sdar_moe" / "moe_norm_false_mixed_layers"
LLADA2_NAMES = ("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax")


def copy_of(folder: Path, to: Path, **changes: Any) -> Path:
    """The checkpoint after changes to config.json; `...` removes a key."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = {**json.loads((to / "config.json").read_text()), **changes}
    (to / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return to


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add, or with None remove tensors."""
    weights = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors")


def stack_experts(folder: Path) -> None:
    """The layout of training code: one tensor a layer and projection, no single experts."""
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    kept = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        front, _, rest = name.partition(".experts.")
        if rest and "shared" not in front:
            number, part, _ = rest.split(".")
            stacked.setdefault(f"{front}.experts.{part}", {})[int(number)] = tensor
        else:
            kept[name] = tensor
    joined = {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacked.items()}
    save_file({**kept, **joined}, folder / "model.safetensors")


def logits_of(model: DiffusionLM) -> torch.Tensor:
    return PagedRun(model).logits([Part(0, torch.arange(16), torch.full((16,), 16))])[0]


def refusal(folder: Path, model_name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, model_name)
    return str(caught.value)


class TestSparseLayers:
    @pytest.mark.parametrize(
        ("changes", "sparse"),
        [
            ({"decoder_sparse_step": 1}, {0, 1, 2}),
            ({"decoder_sparse_step": 2}, {1}),
            ({"decoder_sparse_step": 3}, {2}),
            ({"decoder_sparse_step": ...}, {0, 1, 2}),
            ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, {1}),
            ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, set()),
            ({"decoder_sparse_step": 1, "mlp_only_layers": ...}, {0, 1, 2}),
        ],
    )
    def test_sdar_counts_steps_from_one_and_leaves_the_named_layers_dense(
        self, changes: dict[str, Any], sparse: set[int], tmp_path: Path
    ) -> None:
        facts = read_checkpoint(copy_of(SDAR, tmp_path / "m", **changes))
        config = AutoModel.get("sdar_moe").read_config(facts, ())
        assert config.moe.sparse_layers == sparse  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("first", "sparse"), [(0, {0, 1, 2}), (1, {1, 2}), (2, {2}), (5, set())])
    def test_llada2_begins_with_dense_layers(self, first: int, sparse: set[int], tmp_path: Path) -> None:
        facts = read_checkpoint(copy_of(LLADA2, tmp_path / "m", first_k_dense_replace=first))
        assert Llada2LM.read_config(facts, ()).moe.sparse_layers == sparse

    def test_a_model_has_experts_in_those_layers_only(self) -> None:
        layers = load(SDAR, "sdar_moe").decoder_layers()
        assert [isinstance(layer.mlp, MoeMLP) for layer in layers] == [False, True, False]


class TestConfig:
    def test_what_a_published_llada2_states_is_read(self) -> None:
        config = Llada2LM.read_config(read_checkpoint(LLADA2), ())
        router = config.moe.router
        assert (router.num_experts, router.num_chosen) == (8, 3)
        assert (router.num_groups, router.num_kept_groups, router.scaling) == (4, 2, 2.5)
        assert (router.scoring, router.normalise, router.has_bias, router.in_float32) == (
            "sigmoid", True, True, True,
        )  # fmt: skip
        assert (config.rotary_dim, config.qk_norm, config.norm_rounds_before_weight) == (8, True, True)
        assert (config.moe.expert_size, config.moe.shared_size, config.intermediate_size) == (16, 16, 48)

    def test_one_expert_a_token_is_not_normalised(self, tmp_path: Path) -> None:
        facts = read_checkpoint(copy_of(LLADA2, tmp_path / "m", num_experts_per_tok=1))
        assert not Llada2LM.read_config(facts, ()).moe.router.normalise

    def test_the_shared_width_may_be_stated(self, tmp_path: Path) -> None:
        facts = read_checkpoint(
            copy_of(LLADA2, tmp_path / "m", moe_shared_expert_intermediate_size=24, num_shared_experts=2)
        )
        assert Llada2LM.read_config(facts, ()).moe.shared_size == 48

    @pytest.mark.parametrize("count", [0, None])
    def test_there_may_be_no_shared_expert(self, count: int | None, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m", num_shared_experts=count)
        shared = [n for n in load_file(folder / "model.safetensors") if "shared_experts" in n]
        edit_weights(folder, **dict.fromkeys(shared))
        assert bool(logits_of(load(folder, "llada2")).isfinite().all())

    @pytest.mark.parametrize(
        ("source", "model_name", "changes", "message"),
        [
            (SDAR, "sdar_moe", {"num_experts_per_tok": 7}, "a token cannot go to 7 of 6 experts"),
            (SDAR, "sdar_moe", {"num_experts": ...}, "num_experts must be a positive whole number"),
            (SDAR, "sdar_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of whole numbers"),
            (SDAR, "sdar_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
            (LLADA2, "llada2", {"n_group": 3}, "8 experts do not divide into 3 groups"),
            (LLADA2, "llada2", {"topk_group": 1}, "1 groups of 2 experts hold less than the 3"),
            (LLADA2, "llada2", {"n_group": ...}, "n_group must be a positive whole number, it is absent"),
            (LLADA2, "llada2", {"score_function": "softmax"}, "score_function must be 'sigmoid'"),
            (LLADA2, "llada2", {"partial_rotary_factor": 0.1}, "must be even and in (0, 16], it is 1"),
            (LLADA2, "llada2", {"first_k_dense_replace": -1}, "must be a whole number of at least 0"),
            (
                LLADA2, "llada2", {"using_split_qkv_in_self_attention": True},
                "using_split_qkv_in_self_attention must be False",
            ),
        ],
    )  # fmt: skip
    def test_numbers_that_make_no_network_are_refused(
        self, source: Path, model_name: str, changes: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        assert message in refusal(copy_of(source, tmp_path / "m", **changes), model_name)


class TestNames:
    @pytest.mark.parametrize("name", LLADA2_NAMES)
    def test_all_names_of_llada2_load_the_same_network(self, name: str) -> None:
        assert torch.equal(logits_of(load(LLADA2, name)), logits_of(load(LLADA2, "llada2")))

    def test_training_code_has_another_model_type(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m", model_type="llada2_moe_veomni", architectures=...)
        assert torch.equal(logits_of(load(folder, "llada2_mini")), logits_of(load(LLADA2, "llada2")))

    def test_a_dense_name_is_refused_for_a_checkpoint_with_experts(self) -> None:
        assert "set model_name to 'sdar_moe'" in refusal(SDAR, "sdar")

    def test_a_name_with_experts_is_refused_for_a_dense_checkpoint(self) -> None:
        assert "set model_name to 'sdar'" in refusal(DATA / "sdar" / "dense_b4_headdim", "sdar_moe")

    def test_a_checkpoint_of_llada2_lists_all_its_names(self) -> None:
        message = refusal(LLADA2, "sdar_moe")
        assert all(repr(name) in message for name in LLADA2_NAMES)


class TestWeights:
    @pytest.mark.parametrize(("source", "name"), [(SDAR, "sdar_moe"), (LLADA2, "llada2_mini")])
    def test_experts_may_be_stacked_as_training_code_leaves_them(
        self, source: Path, name: str, tmp_path: Path
    ) -> None:
        folder = copy_of(source, tmp_path / "m")
        stack_experts(folder)
        assert "model.layers.1.mlp.experts.gate_proj" in load_file(folder / "model.safetensors")
        assert torch.equal(logits_of(load(folder, name)), logits_of(load(source, name)))

    def test_a_missing_a_misshapen_and_an_extra_expert_are_named_together(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m")
        layer = "model.layers.1.mlp.experts"
        edit_weights(
            folder,
            **{
                f"{layer}.5.up_proj.weight": None,
                f"{layer}.6.down_proj.weight": torch.zeros(16, 32),
                f"{layer}.8.up_proj.weight": torch.zeros(16, 32),
            },
        )
        message = refusal(folder, "llada2")
        assert f"1 missing: {layer}.5.up_proj.weight;" in message
        assert f"1 unused: {layer}.8.up_proj.weight;" in message
        assert f"1 misshapen: {layer}.6.down_proj.weight is [16, 32], must be [32, 16];" in message

    def test_a_stack_of_another_size_is_misshapen(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m", num_experts=4, n_group=2)
        stack_experts(folder)
        assert "mlp.experts.gate_proj is [8, 16, 32], must be [4, 16, 32]" in refusal(folder, "llada2")

    def test_a_value_that_is_no_number_is_refused_by_the_experts_name(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m")
        name = "model.layers.2.mlp.experts.3.gate_proj.weight"
        weight = load_file(folder / "model.safetensors")[name]
        weight[2, 5] = torch.inf
        edit_weights(folder, **{name: weight})
        assert refusal(folder, "llada2").startswith(f"{name} in ")

    def test_a_bias_that_config_promises_must_be_there(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m")
        edit_weights(folder, **{f"model.layers.{i}.mlp.gate.expert_bias": None for i in (1, 2)})
        message = refusal(folder, "llada2")
        assert "2 missing: model.layers.1.mlp.gate.expert_bias, model.layers.2.mlp.gate" in message

    def test_a_bias_in_the_file_is_used_whatever_config_says(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m", moe_router_enable_expert_bias=False)
        assert torch.equal(logits_of(load(folder, "llada2")), logits_of(load(LLADA2, "llada2")))
        edit_weights(folder, **{f"model.layers.{i}.mlp.gate.expert_bias": None for i in (1, 2)})
        assert not torch.equal(logits_of(load(folder, "llada2")), logits_of(load(LLADA2, "llada2")))

    def test_the_router_stays_in_float32_in_a_narrow_model(self) -> None:
        model = load(LLADA2, "llada2", dtype=torch.bfloat16)
        mlp = model.decoder_layers()[1].mlp
        assert isinstance(mlp, MoeMLP)
        assert mlp.router.weight.dtype == torch.float32
        assert mlp.experts.gate_up.dtype == torch.bfloat16
        worst = (logits_of(model).float() - logits_of(load(LLADA2, "llada2"))).abs().max()
        assert 0 < float(worst) < 1.0

    def test_fused_projections_are_queries_then_keys_then_values(self) -> None:
        fused = load_file(LLADA2 / "model.safetensors")["model.layers.0.attention.query_key_value.weight"]
        whole = load(LLADA2, "llada2").layers[0].attention.qkv.weight
        assert torch.equal(whole, fused)
        for rank in (0, 1):
            given: Any = SimpleNamespace(
                model_name="llada2", checkpoint=read_checkpoint(LLADA2), mask_token_id=0
            )
            model = outline(given, ParallelState(2, rank))
            slots = model.to_empty(device="cpu").weight_slots()
            slots["model.layers.0.attention.query_key_value.weight"].load(fused)
            q, k, v = fused.split([64, 32, 32])
            share = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
            assert torch.equal(model.layers[0].attention.qkv.weight, share)

    def test_biases_of_the_projections_are_read_where_they_are_stated(self, tmp_path: Path) -> None:
        folder = copy_of(LLADA2, tmp_path / "m", use_qkv_bias=True, use_bias=True)
        rows = {"query_key_value": 128, "dense": 32}
        edit_weights(
            folder,
            **{
                f"model.layers.{layer}.attention.{part}.bias": torch.linspace(-1, 1, size)
                for layer in range(3)
                for part, size in rows.items()
            },
        )
        attention = load(folder, "llada2").layers[2].attention
        assert torch.equal(attention.qkv.bias, torch.linspace(-1, 1, 128))
        assert torch.equal(attention.output.bias, torch.linspace(-1, 1, 32))


class TestEngine:
    @pytest.mark.parametrize(("source", "name"), [(SDAR, "sdar_moe"), (LLADA2, "llada2_mini")])
    def test_both_dispatchers_decode_the_same(
        self, source: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        prompts = [list(range(2, 2 + length)) for length in (3, 9, 17)]
        found = []
        for backend in ("standard", "naive"):
            with (
                caplog.at_level(logging.INFO, logger="diffulex"),
                make_engine(source, model_name=name, moe_dispatcher_backend=backend) as engine,
            ):
                experts = [m for m in engine.runner.model.modules() if isinstance(m, Experts)]
                assert {(one.dispatcher, one.gemm_impl) for one in experts} == {(backend, "naive")}
                found.append([o.token_ids for o in engine.generate(prompts, greedy(20)).trajectories])
        assert found[0] == found[1]
        assert "moe_gemm_impl triton -> naive" in caplog.text
