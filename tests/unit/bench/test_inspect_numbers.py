"""The numbers of ``diffulex-bench inspect``: shapes, sizes, special ids, and what fits where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from diffulex.engine.memory import divide_memory
from diffulex.model.catalog import AutoModel
from diffulex.utils.checkpoint import read_checkpoint, weight_headers
from diffulex.utils.device import DeviceFacts, MemoryFacts
from diffulex_bench.inspection import fit as fit_module
from diffulex_bench.inspection.fit import Place, cache_shape
from tests.support.families import CONFIGS, PUBLISHED, shapes_of, write_family
from tests.support.inspections import GIB, ROOMY, edit, inspect, printed, set_places

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _roomy_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_places(monkeypatch, ROOMY)


class TestNumbers:
    @pytest.mark.parametrize("name", AutoModel.names())
    def test_shape_and_size_are_those_of_the_network_that_is_built(self, name: str, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", name)
        facts = read_checkpoint(folder)
        with torch.device("meta"):
            model = AutoModel.get(name).from_facts(facts, weight_headers(facts).keys(), dtype=torch.float32)
        found = inspect(folder)
        assert [tuple(layer) for layer in found.shape.layers] == [
            tuple(layer.kv_shape) for layer in model.attention_layers()
        ]
        assert found.shape.num_layers == model.num_layers
        assert found.shape.hidden_size == model.hidden_size
        loaded = [torch.Size(slot.shape).numel() for slot in model.weight_slots().values()]
        assert found.size.used == sum(loaded)

    def test_published_file_size_of_sdar_4b_is_met_to_the_byte(self, tmp_path: Path) -> None:
        name, sizes = PUBLISHED["SDAR-4B-Chat"]
        found = inspect(write_family(tmp_path / "SDAR-4B-Chat", name, sizes, num_shards=2))
        # The index of the published checkpoint states this total.
        assert found.size.by_dtype["BF16"] == (4_411_424_256, 8_822_848_512)
        assert found.kv_bytes_per_token("bfloat16") == 2 * 36 * 8 * 128 * 2
        assert found.weight_files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    @pytest.mark.parametrize(
        ("checkpoint", "total", "active"),
        [("LLaDA2.0-mini", 16e9, 1.4e9), ("diffusiongemma-26B-A4B-it", 25.2e9, 3.8e9)],
    )
    def test_published_parameter_counts_of_expert_models_are_met(
        self, checkpoint: str, total: float, active: float, tmp_path: Path
    ) -> None:
        name, sizes = PUBLISHED[checkpoint]
        found = inspect(write_family(tmp_path / checkpoint, name, sizes))
        assert found.size.total == pytest.approx(total, rel=0.03)
        assert found.size.active == pytest.approx(active, rel=0.03)

    def test_layers_of_two_kinds_are_added_up(self, tmp_path: Path) -> None:
        name, sizes = PUBLISHED["diffusiongemma-26B-A4B-it"]
        found = inspect(write_family(tmp_path / "gemma", name, sizes))
        assert found.kv_bytes_per_token("bfloat16") == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
        assert (found.asked.block_size, found.asked.page_size) == (256, 256)
        assert found.size.skipped == 2816 * 12

    def test_parts_that_are_no_text_do_not_count_as_weights_to_load(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "gemma", "diffusion_gemma"))
        content = found.as_dict()
        assert content["weight_bytes"]["float32"] == 4 * (found.size.total - 32 * 12)

    def test_head_may_be_tied_its_own_or_its_own_against_config_json(self, tmp_path: Path) -> None:
        own = inspect(write_family(tmp_path / "own", "sdar"))
        tied = inspect(write_family(tmp_path / "tied", "sdar", {"tie_word_embeddings": True}))
        assert (own.shape.is_tied, own.shape.head) == (False, "its own")
        assert (tied.shape.is_tied, tied.shape.head) == (True, "tied to the embedding")
        edit(tmp_path / "own" / "config.json", tie_word_embeddings=True)
        assert inspect(tmp_path / "own").shape.head == "its own, although config.json says tied"
        edit(tmp_path / "tied" / "config.json", tie_word_embeddings=False)
        assert any("no output matrix" in problem for problem in inspect(tmp_path / "tied").problems)

    def test_width_of_a_head_is_read_from_the_weights_where_config_json_is_silent(
        self, tmp_path: Path
    ) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        edit(folder / "config.json", head_dim=None)
        found = inspect(folder)
        assert found.shape.layers[0] == (2, 16)
        assert found.problems == ()

    @pytest.mark.parametrize(
        ("key", "value", "word"),
        [
            ("num_hidden_layers", 5, "num_hidden_layers 5"),
            ("hidden_size", 64, "hidden_size 64"),
            ("num_key_value_heads", 4, "key/value heads"),
            ("vocab_size", 256, "128 rows"),
        ],
    )
    def test_config_json_that_contradicts_the_weights_is_a_problem(
        self, key: str, value: int, word: str, tmp_path: Path
    ) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        edit(folder / "config.json", **{key: value})
        assert any(word in problem for problem in inspect(folder).problems)


class TestIds:
    def test_every_id_comes_with_all_files_that_name_it(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [121, 7]}))
        edit(folder / "config.json", bos_token_id=5, pad_token_id=6)
        found = {(one.role, one.token_id): one for one in inspect(folder).special_ids}
        assert found["mask", 120].sources == ("config.json: mask_token_id",)
        assert found["mask", 120].text == "<|mask|>"
        assert found["eos", 121].sources == (
            "tokenizer_config.json: eos_token",
            "config.json: eos_token_id",
            "generation_config.json: eos_token_id",
        )
        assert found["eos", 7].sources == ("generation_config.json: eos_token_id",)
        assert {("bos", 5), ("pad", 6)} <= set(found)

    def test_mask_of_fast_dllm_v2_is_found_by_its_text(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "fast_dllm_v2"))
        assert (found.special_ids[0].token_id, found.special_ids[0].text) == (120, "|<MASK>|")

    def test_no_mask_id_is_a_problem_until_one_is_written(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "stable_diffcoder")
        edit(folder / "tokenizer_config.json", mask_token=None)
        assert any("no file names a mask id" in problem for problem in inspect(folder).problems)
        found = inspect(folder, mask_token_id=120)
        assert found.problems == ()
        assert found.special_ids[0].sources == ("flag --mask-token-id",)
        assert "--mask-token-id 120" in str(found.command)
        assert any("below" in problem for problem in inspect(folder, mask_token_id=128).problems)

    def test_tokenizer_larger_than_the_vocabulary_is_a_problem(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        (folder / "added_tokens.json").write_text(json.dumps({"<more>": 128}))
        assert any("knows 129 ids" in problem for problem in inspect(folder).problems)

    def test_rows_behind_the_tokenizer_are_told(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "sdar"))
        assert (found.vocab_size, found.tokenizer_size) == (128, 122)
        assert "the last 6 rows are never sampled" in printed(found)

    @pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
    def test_chat_template_may_have_a_file_of_its_own(self, file: str, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        edit(folder / "tokenizer_config.json", chat_template=None)
        assert inspect(folder).chat_template is None
        (folder / file).write_text("{}")
        assert inspect(folder).chat_template == file


class TestFit:
    def need(self, tmp_path: Path) -> Path:
        return write_family(tmp_path / "model", "sdar")

    def test_numbers_are_those_of_the_engines_own_plan(self, tmp_path: Path) -> None:
        found = inspect(
            self.need(tmp_path), max_num_reqs=8, max_model_len=1000, page_size=16, dtype="bfloat16"
        )
        (fit,) = found.fits
        plan = divide_memory(
            found.asked, cache_shape(found.shape.layers, 2), 128, 32 * GIB - 2 * found.size.total
        )
        assert (fit.num_pages, fit.logits_rows, fit.logits_bytes) == (
            plan.num_pages,
            plan.max_logits_rows,
            plan.logits_bytes,
        )
        assert fit.wanted_pages == 8 * 63
        assert (
            fit.wanted_cache_bytes == plan.cache_bytes == 8 * 63 * 16 * found.kv_bytes_per_token("bfloat16")
        )
        assert (fit.verdict, fit.requests_at_once, fit.dtype) == ("fits", 8, "bfloat16")

    def test_unset_dtype_is_what_a_run_on_that_device_takes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = MemoryFacts(total=2 * GIB, free=GIB)
        set_places(monkeypatch, Place("host", "cpu", memory), Place("cuda:0 X", "cuda", memory))
        found = inspect(self.need(tmp_path))
        assert [(fit.place, fit.dtype) for fit in found.fits] == [
            ("host", "float32"),
            ("cuda:0 X", "bfloat16"),
        ]
        assert [fit.weight_bytes for fit in found.fits] == [4 * found.size.total, 2 * found.size.total]

    def test_places_are_the_main_memory_and_every_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fit_module, "device_facts", lambda: DeviceFacts(True, 2, True, ("A", "B")))
        sizes = {"cpu": 7, "cuda:0": 8, "cuda:1": 9}
        monkeypatch.setattr(fit_module, "memory_facts", lambda device: MemoryFacts(10, sizes[str(device)]))
        assert [(one.name, one.kind, one.memory.free) for one in fit_module.places()] == [
            ("host", "cpu", 7),
            ("cuda:0 A", "cuda", 8),
            ("cuda:1 B", "cuda", 9),
        ]

    def test_little_memory_holds_fewer_requests_and_less_holds_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = self.need(tmp_path)
        (plenty,) = inspect(folder, max_num_reqs=8, max_model_len=2048).fits
        tight = plenty.weight_bytes + (plenty.wanted_cache_bytes // 2) * 10 // 9 + 2**19
        verdicts = {}
        for free in (tight, plenty.weight_bytes + 2**16, plenty.weight_bytes - 1):
            set_places(monkeypatch, Place("host", "cpu", MemoryFacts(total=GIB, free=free)))
            (fit,) = inspect(folder, max_num_reqs=8, max_model_len=2048).fits
            verdicts[free] = (fit.verdict, 0 < fit.requests_at_once < 8, fit.reason)
        first, second, third = verdicts.values()
        assert first == ("fits fewer requests", True, None)
        assert second[:2] == ("does not fit", False)
        assert "KV pages" in str(second[2])
        assert "weights alone" in str(third[2])

    def test_tensor_parallel_ranks_divide_matrices_and_heads_and_keep_norms(self, tmp_path: Path) -> None:
        folder = self.need(tmp_path)
        one, two = inspect(folder), inspect(folder, tensor_parallel_size=2)
        norms = sum(shape[0] for shape in shapes_of(CONFIGS["sdar"]).values() if len(shape) == 1)
        assert two.fits[0].weight_bytes == 4 * (norms + (one.size.total - norms) // 2)
        assert two.fits[0].wanted_cache_bytes == one.fits[0].wanted_cache_bytes // 2
        problems = inspect(folder, tensor_parallel_size=8).problems
        assert problems == (
            "tensor_parallel_size=8 does not divide the 4 attention heads and the 2 key/value heads",
        )
