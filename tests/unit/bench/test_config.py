import subprocess
import sys

import pytest
import yaml

from diffulex.settings.layers import layer_of
from diffulex.settings.spec import ConfigError, settings_of
from diffulex_bench.config import BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.tiny import bundled_model
from tests.support.bench_runs import make_settings


@pytest.fixture
def config_file(tmp_path):
    return make_settings(tmp_path)


def origins(bench):
    return {section: {name: origin for name, _, origin in rows} for section, rows in bench.explain().items()}


def test_flags_win_over_overrides_win_over_later_files_win_over_earlier_ones(config_file, tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("eval: {max_tokens: 11, temperature: 0.5, max_nfe: 3}\n")
    bench = BenchConfig.load(
        [config_file, later],
        ["eval.temperature=0.7", "eval.max_nfe=4"],
        layer_of("eval", {"max_nfe": 5}, "flag --max-nfe"),
    )
    assert (bench.eval.max_tokens, bench.eval.temperature, bench.eval.max_nfe) == (11, 0.7, 5)
    found = origins(bench)["eval"]
    assert found["max_tokens"] == f"yaml {later}:1"
    assert found["temperature"] == "--set eval.temperature=0.7"
    assert found["max_nfe"] == "flag --max-nfe"
    assert found["top_k"] == "default"


def test_every_setting_of_both_sections_is_explained(config_file):
    bench = BenchConfig.load([config_file])
    rows = bench.explain()
    assert {name for name, _, _ in rows["eval"]} == set(settings_of(EvalSettings))
    assert "model_path" in {name for name, _, _ in rows["engine"]}
    assert all(origin for section in rows.values() for _, _, origin in section)


def test_bench_has_its_own_default_of_tensor_parallel_size(config_file):
    bench = BenchConfig.load([config_file])
    assert bench.engine_config.tensor_parallel_size == 1
    assert origins(bench)["engine"]["tensor_parallel_size"] == "bench default"
    assert bench.engine_config.pre_merge_lora is False


def test_faults_of_engine_and_eval_are_reported_together(config_file):
    with pytest.raises(ConfigError) as caught:
        BenchConfig.load([config_file], [], layer_of("eval", {"max_tokens": 0}, "flag --max-tokens"))
    assert "max_tokens" in str(caught.value)
    text = config_file.read_text().replace("multi_bd", "foo") + "  overlong_prompt: right\n"
    config_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        BenchConfig.load([config_file])
    assert "overlong_prompt" in str(caught.value)


def test_unknown_key_names_the_nearest_one_with_file_and_line(config_file):
    config_file.write_text(config_file.read_text() + "  max_tokns: 5\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+.*max_tokns.*max_tokens"):
        BenchConfig.load([config_file])


def test_written_config_gives_the_same_run_and_leaves_defaults_defaults(config_file, tmp_path):
    first = BenchConfig.load([config_file], ["eval.max_nfe=7"])
    again_file = tmp_path / "again" / "config.yaml"
    again_file.parent.mkdir()
    again_file.write_text(yaml.safe_dump(first.as_document()))
    again = BenchConfig.load([again_file])
    assert again.eval == first.eval
    assert again.explicit_eval == first.explicit_eval
    assert again.engine_config == first.engine_config
    assert again.engine_config.explicit == first.engine_config.explicit


def test_document_holds_resolved_values_and_their_origins(config_file):
    document = BenchConfig.load([config_file]).as_document()
    assert document["engine"]["decoding_strategy"] == "multi_bd"
    assert document["engine"]["device"] in ("cpu", "cuda")
    assert document["origins"]["engine"]["multi_block_prefix_full"] == "forced by strategy multi_bd"
    assert set(document["origins"]["eval"]) == set(document["eval"])
    assert yaml.safe_load(yaml.safe_dump(document)) == document


def test_relative_path_is_looked_up_beside_the_yaml_that_names_it_then_in_the_working_folder(
    config_file, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    by_yaml = BenchConfig.load([config_file])
    assert by_yaml.search_folders("dataset_data_files") == [tmp_path, elsewhere]
    by_flag = BenchConfig.load(
        [config_file], [], layer_of("eval", {"dataset_data_files": "x"}, "flag --dataset-data-files")
    )
    assert by_flag.search_folders("dataset_data_files") == [elsewhere, tmp_path]


def test_flat_names_find_their_section(config_file, tmp_path):
    values = {"model": str(tmp_path / "model"), "model_name": "sdar", "max_nfe": 3, "block_size": 16}
    bench = BenchConfig.from_flat(values, "model_args")
    assert (bench.engine_config.block_size, bench.eval.max_nfe) == (16, 3)
    assert bench.explicit_eval == {"max_nfe"}
    with pytest.raises(ConfigError, match=r"max_nfee.*max_nfe"):
        BenchConfig.from_flat({**values, "max_nfee": 3}, "model_args")


def test_bundled_model_is_found_by_name_and_a_wrong_name_is_an_error():
    assert bundled_model("bundled:tiny-sdar") == bundled_model("tiny-sdar")
    assert (bundled_model("tiny-sdar") / "tokenizer.json").is_file()
    with pytest.raises(BenchError, match="did you mean bundled:tiny-sdar"):
        bundled_model("bundled:tiny-sda")


@pytest.mark.parametrize("name", ["", " , "])
def test_empty_task_name_is_an_error(name):
    with pytest.raises(ConfigError, match="dataset_name"):
        EvalSettings(dataset_name=name)


def test_several_task_names_are_separated_by_commas():
    assert EvalSettings(dataset_name="a, b,a").task_names == ("a", "b")


def test_settings_are_read_without_torch_transformers_or_lm_eval():
    code = (
        "import sys, diffulex_bench.config, diffulex_bench.main\n"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
