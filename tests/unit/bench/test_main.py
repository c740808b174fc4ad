import importlib.util
import subprocess
import sys

import pytest
import yaml

from diffulex_bench import main as main_module
from diffulex_bench.main import main
from diffulex_bench.runner import RunOutcome
from tests.support.bench_runs import clean_environment, make_settings


@pytest.fixture(autouse=True)
def _environment():
    with clean_environment():
        yield


@pytest.fixture
def config(tmp_path):
    return make_settings(tmp_path)


@pytest.fixture
def never_run(monkeypatch):
    def run(*_, **__):
        raise AssertionError("the run must not start")

    monkeypatch.setattr("diffulex.model.loader.load_model", run)
    monkeypatch.setattr("diffulex_bench.lm_eval_model.build_engine", run)


def edited(config, **changes):
    settings = yaml.safe_load(config.read_text())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        settings[section][name] = value
    config.write_text(yaml.safe_dump(settings))
    return str(config)


def no_tokenizer(config):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (config.parent / "model" / name).unlink()
    return str(config)


def twice(config):
    config.write_text(config.read_text() + "engine:\n  block_size: 16\n")
    return str(config)


@pytest.mark.usefixtures("never_run")
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda c: edited(c, engine__accept_treshold=0.5), ["accept_treshold", "accept_threshold"]),
        (lambda c: edited(c, engine__block_size="many"), ["block_size", "whole number", "run.yaml:"]),
        (twice, ["stands twice"]),
        (lambda c: edited(c, engine__block_size=5), ["block_size", "4, 8, 16, 32", "5"]),
        (lambda c: edited(c, engine__decoding_strategy="foo"), ["decoding_strategy", "foo", "multi_bd"]),
        (lambda c: edited(c, engine__model_path="/no/such/folder"), ["/no/such/folder"]),
        (no_tokenizer, ["tokenizer"]),
        (lambda c: edited(c, eval__dataset_name="gsm8k_difulex"), ["gsm8k_difulex", "gsm8k_diffulex"]),
        (lambda c: edited(c, eval__dataset_limit=0), ["dataset_limit", "null"]),
        (lambda c: edited(c, eval__dataset_data_files="nowhere.jsonl"), ["nowhere.jsonl"]),
        (lambda c: edited(c, engine__model_path="bundled:huge"), ["bundled:tiny-sdar"]),
        (lambda c: str(c) + "x", ["no configuration file"]),
    ],
)
def test_fault_of_the_user_ends_with_code_2_and_one_message_before_weights_load(
    config, capsys, prepare, words
):
    assert main(["--config", prepare(config)]) == 2
    text = capsys.readouterr().err
    assert text.count("error:") == 1
    assert "Traceback" not in text
    for word in words:
        assert word in text
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--blok-size", "4"], "--block-size"),
        (["--block-size", "x"], "block-size"),
        (["--dataset-limit", "0.1"], "positive whole number, or null"),
    ],
)
def test_wrong_flag_ends_with_code_2_and_one_line(capsys, arguments, word):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_missing_lm_eval_is_one_sentence_that_says_what_to_install(config, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a)
    )
    assert main(["--config", str(config)]) == 2
    assert "pip install 'diffulex[bench]'" in capsys.readouterr().err


def test_flags_of_both_sections_reach_the_run(config, monkeypatch):
    seen = []

    def run(bench, logs, *, console, command):
        seen.append((bench, command))
        return RunOutcome(0, config.parent, None)

    monkeypatch.setattr("diffulex_bench.runner.run_benchmark", run)
    words = [
        "--config",
        str(config),
        "--dataset-limit",
        "3",
        "--no-save-results",
        "--block-size",
        "16",
        "--set",
        "engine.page_size=16",
    ]
    assert main(words) == 0
    bench, command = seen[0]
    assert (bench.eval.dataset_limit, bench.eval.save_results) == (3, False)
    assert (bench.engine_config.block_size, bench.engine_config.page_size) == (16, 16)
    assert command == ["diffulex-bench", *words]


def test_without_config_and_model_the_bundled_example_is_run(monkeypatch, capsys):
    seen = []

    def run(bench, logs, *, console, command):
        seen.append(bench)
        return RunOutcome(0, bench.config_files[0], None)

    monkeypatch.setattr("diffulex_bench.runner.run_benchmark", run)
    assert main(["run", "--dataset-limit", "1"]) == 0
    assert seen[0].model_label == "bundled:tiny-sdar"
    assert "tiny_multi_bd" in capsys.readouterr().err


def test_any_other_failure_ends_with_code_1_and_its_traceback(config, monkeypatch, capsys):
    def run(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("diffulex_bench.runner.run_benchmark", run)
    assert main(["--config", str(config)]) == 1
    assert "RuntimeError: out of luck" in capsys.readouterr().err


def test_failure_while_the_engine_loads_stands_in_run_log(config, monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("diffulex_bench.lm_eval_model.build_engine", fail)
    assert main(["--config", str(config)]) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    log = next((config.parent / "out").glob("*/run.log"))
    assert str(log) in text.replace("\n", "")
    assert "Traceback" in log.read_text()


def test_interrupt_before_anything_ran_ends_with_code_130(config, monkeypatch):
    def run(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("diffulex_bench.runner.run_benchmark", run)
    assert main(["--config", str(config)]) == 130


def test_config_command_prints_values_and_with_explain_their_origins(config, capsys):
    assert main(["config", "--config", str(config), "--max-nfe", "9"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert "eval.max_nfe = 9" in plain
    assert main(["config", "--explain", "--config", str(config), "--max-nfe", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "eval.max_nfe = 9  # flag --max-nfe" in lines
    assert any(line.startswith("engine.decoding_strategy = multi_bd  # yaml ") for line in lines)
    assert len(lines) == len(plain)


def test_config_command_draws_a_table_on_a_terminal(config, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(main_module, "_output_console", lambda: Console(force_terminal=True, width=160))
    assert main(["config", "--explain", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "┃" in text
    assert "forced by strategy multi_bd" in text


@pytest.mark.parametrize("command", [["--help"], ["config", "--help"]])
def test_help_loads_neither_torch_nor_lm_eval(command):
    code = (
        "import sys\nfrom diffulex_bench.main import main\n"
        f"try:\n    main({command!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for flag in ("--block-size", "--dataset-limit", "--no-save-results", "--accept-threshold", "--set"):
        assert flag in done.stdout


@pytest.mark.usefixtures("never_run")
def test_data_without_the_field_of_the_task_is_named_with_file_and_fields(config, capsys):
    data = config.parent / "odd.jsonl"
    data.write_text('{"question": "a", "ans": "b"}\n')
    assert main(["--config", str(config), "--dataset-data-files", str(data)]) == 2
    text = capsys.readouterr().err
    for word in (str(data), "'answer'", "question, ans", "gsm8k_diffulex"):
        assert word in text
    assert "Traceback" not in text
    data.write_text('{"q": "a", "answer": "#### 1"}\n')
    assert main(["--config", str(config), "--dataset-data-files", str(data)]) == 2
    assert "no field 'question'" in capsys.readouterr().err
    assert not (config.parent / "out").exists()


def test_failure_before_there_is_a_run_folder_is_told_without_traceback(config, monkeypatch, capsys):
    def run(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("diffulex_bench.runner.run_benchmark", run)
    monkeypatch.delenv(main_module.DEBUG_VARIABLE, raising=False)
    assert main(["--config", str(config)]) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "set DIFFULEX_DEBUG=1" in text
    monkeypatch.setenv(main_module.DEBUG_VARIABLE, "1")
    assert main(["--config", str(config)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.split()[:1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert all([name] in lines for name in main_module.COMMANDS)
