"""Which families ``diffulex-bench inspect`` recognises, what it says of damaged folders, what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.model.catalog import AutoModel, names_of
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.utils.checkpoint import CheckpointError, read_checkpoint
from diffulex_bench.inspection.families import FAMILIES, recognise
from diffulex_bench.inspection.show import as_size
from diffulex_bench.main import main
from tests.golden.cases import model_folders
from tests.support.families import CONFIGS, shapes_of, write_family
from tests.support.inspections import ROOMY, edit, inspect, printed, set_places, truncate

if TYPE_CHECKING:
    from pathlib import Path

NAMES = tuple(MODEL_DEFAULTS)


@pytest.fixture(autouse=True)
def _roomy_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_places(monkeypatch, ROOMY)


class TestFamilies:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_model_name_is_told_from_its_published_layout_without_a_problem(
        self, name: str, tmp_path: Path
    ) -> None:
        found = inspect(write_family(tmp_path / "model", name))
        assert name in found.recognition.names
        assert found.problems == ()
        alike = next(family for family in FAMILIES if name in family.names)
        assert set(found.recognition.names) == set(alike.names)
        assert {option.model_name for option in found.options} == set(alike.names)

    def test_every_model_name_of_the_settings_stands_in_the_table_once(self) -> None:
        assert sorted(name for family in FAMILIES for name in family.names) == sorted(NAMES)

    @pytest.mark.parametrize("folder", model_folders(), ids=lambda one: f"{one.parent.name}-{one.name}")
    def test_golden_checkpoints_are_recognised(self, folder: Path) -> None:
        found = inspect(folder)
        assert folder.parent.name in found.recognition.names
        assert found.problems == ()

    @pytest.mark.parametrize("name", NAMES)
    def test_weight_names_alone_tell_the_family_when_config_json_names_none(
        self, name: str, tmp_path: Path
    ) -> None:
        folder = write_family(tmp_path / "model", name)
        edit(folder / "config.json", architectures=None, model_type=None)
        found = recognise(json.loads((folder / "config.json").read_text()), shapes_of(CONFIGS[name]), "model")
        assert name in found.names
        assert found.told_by.startswith("tensor names")

    @pytest.mark.parametrize(
        "name", [name for name in NAMES if "llada2" in name or name == "diffusion_gemma"]
    )
    def test_layouts_of_their_own_are_never_taken_for_others(self, name: str) -> None:
        names = shapes_of(CONFIGS[name])
        assert [family for family in FAMILIES if family.fits(names)] == [
            family for family in FAMILIES if name in family.names
        ]

    @pytest.mark.parametrize(
        ("label", "name"),
        [
            ("DiffuCoder-7B-cpGRPO", "diffucoder"),
            ("Dream-v0-Instruct-7B", "dream"),
            ("LLaDA2.0-mini", "llada2_mini"),
            ("LLaDA2.0-flash", "llada2"),
            ("LLaDA2.1-mini", "llada2dot1_mini"),
            ("DMax-Math-16B", "llada2_mini_dmax"),
        ],
    )
    def test_folders_name_puts_one_of_several_names_first(
        self, label: str, name: str, tmp_path: Path
    ) -> None:
        found = inspect(write_family(tmp_path / label, name))
        assert found.recognition.names[0] == found.asked.model_name == name
        assert len(found.recognition.names) > 1

    def test_dream_and_its_reasoner_share_a_model_type_and_are_told_apart(self, tmp_path: Path) -> None:
        for name in ("dream", "dream_reasoner"):
            folder = write_family(tmp_path / name, name)
            edit(folder / "config.json", architectures=None)
            assert name in inspect(folder).recognition.names
        config = json.loads((tmp_path / "dream_reasoner" / "config.json").read_text())
        assert recognise(config, (), "x").names == ("dream_reasoner",)
        assert recognise({**config, "block_size": None}, (), "x").names == ("dream", "diffucoder")

    def test_published_code_names_a_family_whose_model_type_is_anothers(self) -> None:
        code = {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"}
        found = recognise(
            {"model_type": "llama", "auto_map": code}, shapes_of(CONFIGS["stable_diffcoder"]), "x"
        )
        assert found.names == ("stable_diffcoder",)

    def test_foreign_model_has_no_name_and_that_is_a_problem(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        edit(folder / "config.json", architectures=["Qwen3ForCausalLM"], model_type="qwen3")
        found = inspect(folder)
        assert found.recognition.names == ()
        assert "model_type qwen3" in found.problems[0]
        assert found.command is None

    def test_weights_of_another_family_than_config_json_says_are_a_problem(self, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", "dream")
        edit(folder / "config.json", architectures=["SDARForCausalLM"], model_type="sdar")
        (problem,) = inspect(folder).problems
        assert "not those of sdar" in problem
        assert "dream" in problem

    @pytest.mark.parametrize("name", AutoModel.names())
    def test_families_that_are_built_recognise_the_same_checkpoints(self, name: str, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", name)
        assert set(names_of(read_checkpoint(folder))) <= set(inspect(folder).recognition.names)


class TestProblems:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), ["lacks 1 of the 3", "00002"]),
            (lambda f: truncate(f / "model-00003-of-00003.safetensors"), ["truncated", "00003"]),
            (lambda f: (f / "config.json").unlink(), ["no config.json"]),
            (lambda f: (f / "config.json").write_text("{"), ["not valid JSON"]),
            (lambda f: (f / "tokenizer.json").unlink(), ["no tokenizer"]),
            (lambda f: (f / "tokenizer.json").write_text('{"added_tokens": [3]}'), ["vocabulary", "restore"]),
            (lambda f: edit(f / "config.json", vocab_size=None), ["no vocab_size"]),
            (lambda f: edit(f / "config.json", vocab_size="many"), ["vocab_size", "many"]),
        ],
    )
    def test_each_is_told_with_code_2_and_without_a_traceback(
        self, damage: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_family(tmp_path / "model", "sdar", num_shards=3)
        damage(folder)
        assert main(["inspect", str(folder)]) == 2
        out, err = capsys.readouterr()
        told = [line for line in out.splitlines() if line.startswith("problem: ")]
        assert any(all(word in line for word in words) for line in told)
        assert "Traceback" not in out + err

    def test_all_problems_are_told_at_once_beside_what_is_known(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_family(tmp_path / "model", "sdar", num_shards=3)
        (folder / "tokenizer.json").unlink()
        (folder / "model-00001-of-00003.safetensors").unlink()
        truncate(folder / "model-00002-of-00003.safetensors")
        assert main(["inspect", str(folder)]) == 2
        out = capsys.readouterr().out
        assert out.count("problem: ") == 3
        assert "run it" not in out
        assert "sdar (architectures SDARForCausalLM" in out
        assert "2 layers of width 32" in out

    def test_folder_that_is_not_there_is_one_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for given in (str(tmp_path / "none"), "JetLM/SDAR-4B-Chat", "bundled:huge"):
            assert main(["inspect", given]) == 2
            text = capsys.readouterr().err
            assert text.count("error:") == 1
            assert "Traceback" not in text
        with pytest.raises(CheckpointError):
            inspect(tmp_path / "none")

    def test_written_name_of_another_family_is_a_problem(self, tmp_path: Path) -> None:
        (problem,) = inspect(write_family(tmp_path / "model", "llada"), model_name="sdar").problems
        assert "model_name='sdar' does not read this checkpoint" in problem
        assert "use llada" in problem

    def test_separate_tokenizer_folder_is_used(self, tmp_path: Path) -> None:
        folder, other = write_family(tmp_path / "model", "sdar"), write_family(tmp_path / "other", "sdar")
        (folder / "tokenizer.json").unlink()
        found = inspect(folder, tokenizer_path=str(other))
        assert found.problems == ()
        assert f"--tokenizer-path {other}" in str(found.command)


class TestOutput:
    def test_json_holds_the_same_numbers_as_data(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_family(tmp_path / "model", "dream")
        assert main(["inspect", str(folder), "--json", "--max-num-reqs", "2"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["recognition"]["names"] == ["dream", "diffucoder"]
        assert content["asked"]["max_num_reqs"] == 2
        assert content["size"]["by_dtype"]["BF16"]["bytes"] == 2 * content["size"]["total"]
        assert content["kv_bytes_per_token"] == {"float32": 256, "bfloat16": 128, "float16": 128}
        assert content["kv_bytes_per_page"]["float32"] == 256 * content["asked"]["page_size"]
        assert content["shape"]["layers"] == [{"num_kv_heads": 2, "head_dim": 8}] * 2
        assert content["problems"] == []
        assert content["fits"][0]["verdict"] == "fits"

    def test_json_tells_problems_with_code_2_too(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_family(tmp_path / "model", "sdar")
        truncate(folder / "model.safetensors")
        assert main(["inspect", str(folder), "--json"]) == 2
        content = json.loads(capsys.readouterr().out)
        assert "truncated" in content["problems"][0]
        assert content["fits"] == []

    def test_pipe_gets_plain_lines_and_a_terminal_a_table(self, tmp_path: Path) -> None:
        found = inspect(write_family(tmp_path / "model", "sdar"))
        plain, table = printed(found), printed(found, force_terminal=True)
        assert "│" not in plain
        assert "\x1b" not in plain
        assert "│" in table
        for text in ("sdar (architectures SDARForCausalLM, model_type sdar)", "mask 120 <|mask|>"):
            assert text in plain
            assert text in table

    def test_sizes_are_told_in_the_unit_that_leaves_a_readable_number(self) -> None:
        assert [as_size(number) for number in (0, 1023, 1024, 1.5 * 2**20, 5 * 2**40, 2**60)] == [
            "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 TiB", "1048576.0 TiB",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--max-num-rqs", "1"], "--max-num-reqs"),
            (["--page-size", "many"], "page-size"),
            ([], "MODEL_DIR"),
        ],
    )
    def test_wrong_flag_ends_with_code_2_and_one_line(
        self, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = [str(write_family(tmp_path / "model", "sdar"))] if words else []
        with pytest.raises(SystemExit) as caught:
            main(["inspect", *place, *words])
        assert caught.value.code == 2
        assert told in capsys.readouterr().err

    def test_value_out_of_bounds_is_an_error_with_its_flag(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["inspect", str(write_family(tmp_path / "model", "sdar")), "--page-size", "5"]) == 2
        text = capsys.readouterr().err
        assert "page_size must be one of" in text
        assert "[flag --page-size]" in text

    def test_help_loads_no_torch(self) -> None:
        code = (
            "import sys\nfrom diffulex_bench.main import main\n"
            "try:\n    main(['inspect', '--help'])\nexcept SystemExit:\n    pass\n"
            "print([name for name in ('torch', 'transformers', 'lm_eval') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "--max-model-len" in done.stdout
        assert done.stdout.splitlines()[-1] == "[]"
