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


@pytest.fixture
def run_file(config_file, tmp_path):
    """The ``config.yaml`` of a run in which the user wrote nothing about ``max_nfe``."""
    path = tmp_path / "again" / "config.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(BenchConfig.load([config_file]).as_document(), sort_keys=False))
    return path


def changed(path, section, **values):
    document = yaml.safe_load(path.read_text())
    document[section] |= values
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def test_value_edited_in_the_file_of_a_run_counts_as_written(run_file):
    changed(run_file, "eval", max_nfe=2, top_k=3)
    changed(run_file, "engine", accept_threshold=0.8, enable_prefix_caching=False)
    bench = BenchConfig.load([run_file])
    assert (bench.eval.max_nfe, bench.eval.top_k) == (2, 3)
    assert bench.engine_config.accept_threshold == 0.8
    assert bench.engine_config.enable_prefix_caching is False
    assert bench.explicit_eval >= {"max_nfe", "top_k"}
    assert "max_tokens" not in bench.explicit_eval
    assert origins(bench)["eval"]["max_nfe"].startswith(f"yaml {run_file}:")


def test_value_that_is_not_a_default_but_derived_counts_as_written_once_edited(run_file):
    document = yaml.safe_load(run_file.read_text())
    derived = document["origins"]["values"]["engine"]
    assert derived["device"] == document["engine"]["device"]
    assert "device" not in BenchConfig.load([run_file]).engine_config.explicit
    changed(run_file, "engine", dtype="bfloat16" if derived["dtype"] != "bfloat16" else "float16")
    assert "dtype" in BenchConfig.load([run_file]).engine_config.explicit


def test_override_flag_and_other_file_win_over_the_file_of_a_run(run_file, tmp_path):
    assert BenchConfig.load([run_file], ["eval.max_nfe=3"]).eval.max_nfe == 3
    flag = layer_of("eval", {"max_nfe": 4}, "flag --max-nfe")
    assert BenchConfig.load([run_file], [], flag).eval.max_nfe == 4
    other = tmp_path / "other.yaml"
    other.write_text("eval: {max_nfe: 5}\n")
    assert BenchConfig.load([run_file, other]).eval.max_nfe == 5


def test_default_in_the_file_of_a_run_hides_no_value_of_an_earlier_file(run_file, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("eval: {max_nfe: 5}\n")
    assert BenchConfig.load([other, run_file]).eval.max_nfe == 5


def test_value_without_an_origin_counts_as_written(run_file):
    document = yaml.safe_load(run_file.read_text())
    del document["origins"]["eval"]["max_tokens"]
    run_file.write_text(yaml.safe_dump(document))
    assert "max_tokens" in BenchConfig.load([run_file]).explicit_eval


def test_default_that_was_another_one_when_the_run_was_made_is_kept(run_file):
    document = yaml.safe_load(run_file.read_text())
    document["eval"]["max_tokens"] = document["origins"]["values"]["eval"]["max_tokens"] = 128
    run_file.write_text(yaml.safe_dump(document))
    assert "max_tokens" not in BenchConfig.load([run_file]).explicit_eval
    del document["origins"]["values"]["eval"]["max_tokens"]
    run_file.write_text(yaml.safe_dump(document))
    assert BenchConfig.load([run_file]).eval.max_tokens == 128


def test_faults_of_a_file_of_values_and_of_the_task_name_are_reported_together(config_file):
    text = config_file.read_text().replace("multi_bd", "foo").replace("gsm8k_diffulex", "gsm8k_difulex")
    config_file.write_text(text + "  max_tokns: 5\n")
    with pytest.raises(ConfigError) as caught:
        BenchConfig.load([config_file])
    named = "\n".join(caught.value.problems)
    assert "max_tokns" in named
    assert "decoding_strategy" in named
    assert "there is no task 'gsm8k_difulex'; did you mean 'gsm8k_diffulex'?" in caught.value.problems


def test_known_task_is_no_fault_beside_others(config_file):
    config_file.write_text(config_file.read_text() + "  max_tokns: 5\n")
    with pytest.raises(ConfigError) as caught:
        BenchConfig.load([config_file])
    assert len(caught.value.problems) == 1


def test_misspelt_name_in_the_wrong_section_names_the_right_one(config_file):
    with pytest.raises(ConfigError, match=r"temprature.*did you mean eval\.temperature\?"):
        BenchConfig.load([config_file], ["engine.temprature=0.5"])
