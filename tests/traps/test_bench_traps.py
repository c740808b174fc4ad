"""Known traps of benchmark harnesses, one or more tests each; the names carry the trap's ID."""

import hashlib
import json
import logging
import socket

import pytest
import yaml

from diffulex.settings.spec import ConfigError
from diffulex_bench.config import BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.lm_eval_model import DiffulexLM
from diffulex_bench.main import main
from diffulex_bench.records import read_records
from diffulex_bench.scoring import grade_number
from diffulex_bench.tasks import _manager, load_tasks
from tests.support.bench import FakeConfig, FakeEngine, make_instance
from tests.support.bench_runs import clean_environment, gold_answer, make_settings, run_with, write_problems

CHAT_TASK = """
task: chatty
custom_dataset: !function data.load
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(autouse=True)
def _environment():
    with clean_environment():
        yield


@pytest.fixture
def chat_folder(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.py").write_text(
        "from datasets import Dataset\n\n"
        "def load(**_):\n    return {'test': Dataset.from_list([{'question': 'q', 'answer': 'a\\n\\nb'}])}\n"
    )
    return folder


def lm_for(answer, *, config=None, graders=None, **evaluation):
    bench = BenchConfig({"model": "/m"}, {}, EvalSettings(**evaluation), dict.fromkeys(evaluation, "flag"))
    engine = FakeEngine(answer, config or FakeConfig())
    return DiffulexLM(engine=engine, bench=bench, graders=graders)


def load_chatty(folder, text=CHAT_TASK, **evaluation):
    (folder / "chatty.yaml").write_text(text)
    values = {"dataset_name": "chatty", "include_path": str(folder), **evaluation}
    return load_tasks(BenchConfig({}, {}, EvalSettings(**values), dict.fromkeys(values, "flag")))


def notices(caplog):
    return [line.getMessage() for line in caplog.records if line.name.startswith("diffulex")]


def results_of(outcome):
    return json.loads((outcome.folder / "results.json").read_text())


def test_b11_empty_answers_are_stops_flagged_and_counted_and_their_forwards_too(tmp_path):
    outcome, _, text = run_with(make_settings(tmp_path), lambda _: "")
    record = read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")[0]
    assert (record.empty, record.finish_reason, record.tokens_output) == (True, "stop", 0)
    costs = results_of(outcome)["tasks"]["gsm8k_diffulex"]["costs"]
    assert costs["num_empty"] == 6
    assert costs["nfe"]["total"] == 30
    assert costs["tpf"] == 0.0
    assert "empty answers 6" in text


def test_b14_task_without_until_gets_no_hidden_stop_and_one_notice(chat_folder, caplog):
    with caplog.at_level(logging.WARNING, "diffulex_bench"):
        loaded = load_chatty(chat_folder)
    assert loaded.tasks["chatty"].config.generation_kwargs == {"until": []}
    assert notices(caplog) == [
        "task chatty names no stop strings; lm-eval would add '\\n\\n', here only the end of sequence stops"
    ]


def test_b14_other_arguments_of_a_task_without_until_are_kept(chat_folder):
    loaded = load_chatty(chat_folder, CHAT_TASK + "generation_kwargs: {max_gen_toks: 77}\n")
    assert loaded.tasks["chatty"].config.generation_kwargs == {"max_gen_toks": 77, "until": []}


def test_b14_delimiter_that_the_task_wrote_itself_is_a_stop(chat_folder, caplog):
    with caplog.at_level(logging.WARNING, "diffulex_bench"):
        loaded = load_chatty(chat_folder, CHAT_TASK + 'generation_kwargs: {until: ["\\n\\n"]}\n')
    assert loaded.tasks["chatty"].config.generation_kwargs["until"] == ["\n\n"]
    assert notices(caplog) == []


def test_b14_until_of_an_included_file_or_a_group_counts_as_written(chat_folder):
    (chat_folder / "base.yaml").write_text('generation_kwargs: {until: ["\\n\\n"]}\n')
    loaded = load_chatty(chat_folder, "include: base.yaml\n" + CHAT_TASK)
    assert loaded.tasks["chatty"].config.generation_kwargs["until"] == ["\n\n"]
    (chat_folder / "group.yaml").write_text(
        'group: all_chat\ntask: [{task: chatty, generation_kwargs: {until: ["END"]}}]\n'
    )
    loaded = load_chatty(chat_folder, dataset_name="all_chat")
    assert loaded.tasks["chatty"].config.generation_kwargs["until"] == ["END"]


def test_b14_answer_with_a_blank_line_arrives_whole(chat_folder, tmp_path):
    load_chatty(chat_folder)
    config = make_settings(
        tmp_path, dataset_name="chatty", include_path=str(chat_folder), dataset_data_files=None
    )
    outcome, engine, _ = run_with(config, lambda _: "a\n\nb")
    assert engine.seen[0][1].stop == ()
    assert results_of(outcome)["tasks"]["chatty"]["accuracy"]["value"] == 1.0


@pytest.mark.parametrize(
    ("until", "stops", "text"),
    [
        ("Question:", ("Question:",), "one\n"),
        (["\nQuestion:", "</s>"], ("\nQuestion:", "</s>"), "one"),
        (["three", "two", "one"], ("three", "two", "one"), ""),
    ],
)
def test_b15_until_may_be_text_or_list_is_a_real_stop_and_cuts_at_the_earliest_match(until, stops, text):
    lm = lm_for(lambda _: "one\nQuestion: two </s> three")
    assert lm.generate_until([make_instance("q", {"until": until})]) == [text]
    assert lm.engine.seen[0][1].stop == stops
    assert lm.records[0].finish_reason == "stop"
    assert lm.records[0].stop_reason == "stop_string"


def test_b15_text_is_cut_even_when_the_engine_returned_more():
    lm = lm_for(lambda _: "never")
    lm.engine.generate = _without_stops(lm.engine.generate, "one STOP two")
    assert lm.generate_until([make_instance("q", {"until": ["STOP"]})]) == ["one "]


def _without_stops(generate, text):
    def run(prompts, params, *, on_finish, **more):
        def finish(index, output):
            output.text = text
            on_finish(index, output)

        return generate(prompts, params, on_finish=finish, **more)

    return run


def test_b17_text_behind_the_stop_does_not_come_back_when_thoughts_are_stripped():
    lm = lm_for(lambda _: "")
    lm.engine.generate = _without_stops(lm.engine.generate, "<think>a</think>answer STOP extra")
    assert lm.generate_until([make_instance("q", {"until": [" STOP"]})]) == ["answer"]
    assert lm.records[0].thinking == "a"
    assert lm.engine.seen[0][1].stop_after == "</think>"


def test_b17_stop_string_inside_the_thoughts_does_not_cut_the_answer():
    lm = lm_for(lambda _: "")
    lm.engine.generate = _without_stops(lm.engine.generate, "<think>so STOP it</think>answer")
    assert lm.generate_until([make_instance("q", {"until": ["STOP"]})]) == ["answer"]


def test_b19_prompt_that_exceeds_the_window_is_recorded_as_failed_and_hurts_no_other():
    lm = lm_for(lambda _: "#### 1", config=FakeConfig(max_model_len=8), graders={"toy": grade_number})
    requests = [make_instance("x" * 18, doc_id=0), make_instance("short", doc_id=1)]
    assert lm.generate_until(requests) == ["", "#### 1"]
    failed = next(record for record in lm.records if record.doc_id == 0)
    assert (failed.prompt_too_long, failed.finish_reason, failed.nfe["total"]) == (True, "error", 0)
    assert "18 tokens" in failed.error
    assert "(8)" in failed.error
    assert failed.scores["strict_match"] == 0.0


def test_b19_left_policy_keeps_the_end_of_the_prompt():
    lm = lm_for(lambda _: "ok", config=FakeConfig(max_model_len=8), overlong_prompt="left", max_tokens=3)
    assert lm.generate_until([make_instance("0123456789abc")]) == ["ok"]
    record = lm.records[0]
    assert (record.prompt, record.num_prompt_tokens_cut, record.error) == ("89abc", 8, None)
    assert record.prompt_sha256 == hashlib.sha256(b"0123456789abc").hexdigest()


def test_b19_prompts_that_were_too_long_are_counted_in_the_report(tmp_path):
    config = make_settings(tmp_path)
    outcome, _, text = run_with(config, gold_answer, config=FakeConfig(max_model_len=10))
    assert outcome.exit_code == 0
    costs = results_of(outcome)["tasks"]["gsm8k_diffulex"]["costs"]
    assert (costs["num_prompts_too_long"], costs["num_errors"]) == (6, 6)
    assert "prompts too long 6" in text


def test_b25_exact_prompt_and_its_hash_are_stored(tmp_path):
    outcome, _, _ = run_with(make_settings(tmp_path), gold_answer)
    record = read_records(outcome.folder / "samples_gsm8k_diffulex.jsonl")[3]
    assert record.prompt == "What is 3 + 3?\n"
    assert record.prompt_sha256 == hashlib.sha256(b"What is 3 + 3?\n").hexdigest()
    assert record.prompt_sha256 != hashlib.sha256(b"What is 3 + 3?\n\n\n").hexdigest()


def test_b32_misspelt_threshold_is_an_error_with_the_nearest_name(tmp_path):
    config = make_settings(tmp_path)
    settings = yaml.safe_load(config.read_text())
    settings["engine"]["accept_treshold"] = 0.5
    config.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"accept_treshold.*accept_threshold"):
        BenchConfig.load([config])


def test_b32_misspelt_name_in_model_args_is_an_error_too():
    with pytest.raises(ConfigError, match=r"accept_treshold.*accept_threshold"):
        DiffulexLM("/m", accept_treshold=0.5)


@pytest.mark.parametrize("limit", [0.1, 0, -1, "all"])
def test_b34_limit_that_is_no_positive_number_is_refused_and_told_what_is_right(tmp_path, limit):
    with pytest.raises(ConfigError, match="positive whole number, or null"):
        BenchConfig.load([make_settings(tmp_path, dataset_limit=limit)])


@pytest.mark.parametrize(("limit", "num"), [(None, 6), (10**9, 6), (4, 4)])
def test_b34_null_and_large_limits_mean_the_whole_task(tmp_path, limit, num):
    outcome, _, _ = run_with(make_settings(tmp_path, dataset_limit=limit), gold_answer)
    assert results_of(outcome)["tasks"]["gsm8k_diffulex"]["num_finished"] == num


def test_b34_limit_holds_for_each_task_of_a_run(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(
            CHAT_TASK.replace("chatty", name).replace("data.load", "os.getcwd")
        )
    config = make_settings(tmp_path, dataset_name="one,two", include_path=str(folder), dataset_limit=2)
    outcome, _, _ = run_with(config, lambda _: "x")
    assert {name: task["num_finished"] for name, task in results_of(outcome)["tasks"].items()} == {
        "one": 2,
        "two": 2,
    }


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("The total is $1,234.00.", "1234"), ("It costs $29.00", "29"), ("so 70,000.", "70000"),
        ("#### 18.0", "18"), ("#### 18", "18.0"), ("#### $1,234.00.", "1234"),
    ],
)  # fmt: skip
def test_b37_currency_thousands_and_full_stops_do_not_make_an_answer_wrong(answer, target):
    grade = grade_number({"answer": f"#### {target}"}, answer)
    assert grade.scores["flexible_match"] == 1.0
    assert grade.scores["strict_match"] == float("####" in answer)
    assert grade.extracted in answer


@pytest.mark.parametrize(
    ("answer", "value", "empty"),
    [(gold_answer, 1.0, 0), (lambda _: "", 0.0, 6), (lambda _: "It is 7.5\n#### 7.5", 0.0, 0)],
    ids=["gold", "empty", "wrong"],
)
def test_b41_gold_answers_score_100_empty_and_wrong_ones_0(tmp_path, answer, value, empty):
    outcome, _, _ = run_with(make_settings(tmp_path), answer)
    task = results_of(outcome)["tasks"]["gsm8k_diffulex"]
    assert {name: score["value"] for name, score in task["scores"].items()} == {
        "strict_match": value,
        "flexible_match": value,
    }
    assert task["costs"]["num_empty"] == empty


@pytest.mark.parametrize(("kind", "value"), [("gold", 1.0), ("empty", 0.0), ("wrong", 0.0)])
def test_b41_generated_problems_are_scored_right(tmp_path, kind, value):
    from diffulex_bench.tiny.data import test_problems as make_problems

    solutions = {problem.prompt: problem.solution for problem in make_problems(20)}
    answers = {"gold": solutions.__getitem__, "empty": lambda _: "", "wrong": lambda _: "#### -0.125"}
    config = make_settings(
        tmp_path, dataset_name="gsm_symbolic_diffulex", dataset_data_files=None, dataset_limit=20
    )
    outcome, _, _ = run_with(config, answers[kind])
    scores = results_of(outcome)["tasks"]["gsm_symbolic_diffulex"]["scores"]
    assert {name: score["value"] for name, score in scores.items()} == {
        "strict_match": value,
        "flexible_match": value,
    }


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("place", ["absolute", "beside the yaml", "working folder"])
def test_b46_local_data_needs_no_network_wherever_it_stands(tmp_path, monkeypatch, place):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    config = make_settings(tmp_path / "home")
    data = {"absolute": tmp_path / "p.jsonl", "beside the yaml": tmp_path / "home" / "p.jsonl"}.get(
        place, work / "p.jsonl"
    )
    write_problems(data, 3)
    settings = yaml.safe_load(config.read_text())
    settings["eval"]["dataset_data_files"] = str(data) if place == "absolute" else data.name
    config.write_text(yaml.safe_dump(settings))
    outcome, engine, _ = run_with(config, gold_answer)
    assert outcome.exit_code == 0
    assert len(engine.seen) == 3


@pytest.mark.usefixtures("no_network")
def test_b46_generated_problems_need_no_network(tmp_path):
    config = make_settings(
        tmp_path, dataset_name="gsm_symbolic_diffulex", dataset_data_files=None, dataset_limit=2
    )
    outcome, _, _ = run_with(config, lambda _: "#### 1")
    assert results_of(outcome)["tasks"]["gsm_symbolic_diffulex"]["num_finished"] == 2


@pytest.mark.usefixtures("no_network")
def test_b46_hub_name_as_model_is_a_clear_error(tmp_path, capsys):
    assert main(["--model-path", "some-org/some-model", "--model-name", "sdar"]) == 2
    text = capsys.readouterr().err
    assert "some-org/some-model" in text
    assert "Traceback" not in text


def test_b46_remote_code_is_off_unless_written(tmp_path):
    assert BenchConfig.load([make_settings(tmp_path)]).engine_config.trust_remote_code is False


def test_b47_users_task_wins_over_the_bundled_one_with_a_notice(chat_folder, tmp_path, caplog):
    text = CHAT_TASK.replace("task: chatty", "task: gsm8k_diffulex") + "generation_kwargs: {until: []}\n"
    with caplog.at_level(logging.WARNING, "diffulex_bench"):
        loaded = load_chatty(chat_folder, text, dataset_name="gsm8k_diffulex")
    task = loaded.tasks["gsm8k_diffulex"]
    assert task.doc_to_text(task.eval_docs[0]) == "q"
    assert notices(caplog) == [
        f"task gsm8k_diffulex is taken from {chat_folder / 'chatty.yaml'}; it replaces the bundled one"
    ]


def test_b47_bundled_tasks_stay_beside_the_users(chat_folder):
    loaded = load_chatty(chat_folder, dataset_name="gsm_symbolic_diffulex,chatty")
    assert list(loaded.tasks) == ["gsm_symbolic_diffulex", "chatty"]


def test_b47_unknown_name_is_refused_without_parsing_lm_evals_tree(monkeypatch):
    def make(folders, rules, *, include_defaults):
        assert not include_defaults
        return _manager(folders, rules, include_defaults=False)

    monkeypatch.setattr("diffulex_bench.tasks._manager", make)
    settings = EvalSettings(dataset_name="gsm8k_cot_zeroshott")
    with pytest.raises(BenchError, match="did you mean gsm8k_cot_zeroshot"):
        load_tasks(BenchConfig({}, {}, settings, {}))


def test_b47_empty_include_path_disables_the_bundled_tasks():
    settings = EvalSettings(dataset_name="gsm8k_diffulex", include_path="")
    with pytest.raises(
        BenchError, match="there is no task 'gsm8k_diffulex' in no folder or lm-eval's own tasks"
    ):
        load_tasks(BenchConfig({}, {}, settings, {}))


def test_b50_multiple_choice_task_is_refused_before_weights_load(chat_folder, tmp_path, monkeypatch, capsys):
    (chat_folder / "choice.yaml").write_text(
        CHAT_TASK.replace("task: chatty", "task: choice")
        + "output_type: multiple_choice\ndoc_to_choice: [a, b]\n"
    )
    monkeypatch.setattr("diffulex_bench.lm_eval_model.build_engine", None)
    config = make_settings(
        tmp_path, dataset_name="choice", include_path=str(chat_folder), dataset_data_files=None
    )
    assert main(["--config", str(config)]) == 2
    text = capsys.readouterr().err
    assert "task choice scores log-likelihoods (multiple_choice), which are not supported" in text


def test_b50_adapter_never_answers_a_log_likelihood_request():
    lm = lm_for(lambda _: "x")
    with pytest.raises(NotImplementedError, match="no estimator"):
        lm.loglikelihood([make_instance("q")])
