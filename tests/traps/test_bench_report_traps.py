"""Known traps of reports and prompts of the bench; the names carry the trap's ID."""

import json

import pytest

from diffulex.utils.output import StepReport
from diffulex_bench.main import main
from diffulex_bench.step_times import StepTimes
from tests.support.bench_runs import clean_environment, gold_answer, make_settings, run_with


@pytest.fixture(autouse=True)
def _environment():
    with clean_environment():
        yield


def test_b30_report_splits_time_into_prefill_decode_and_other_and_counts_recomputed_tokens(tmp_path):
    outcome, engine, text = run_with(make_settings(tmp_path), gold_answer)
    found = json.loads((outcome.folder / "results.json").read_text())
    time, costs = found["time"], found["total"]
    steps = len(engine.seen)
    # Each step of the fake engine takes 10 s, 8 of them for 6 rows of prompt and 2 rows of decoding.
    assert time["prefill"] == pytest.approx(6.0 * steps)
    assert time["decode"] == pytest.approx(2.0 * steps)
    assert time["rebuild"] == 0.0
    assert time["other"] == pytest.approx(2.0 * steps)
    assert time["total"] == pytest.approx(10.0 * steps)
    assert time["parts"]["forward"] == pytest.approx(6.0 * steps)
    assert time["rows"] == {"prefill": 6 * steps, "denoise": steps, "store": steps}
    assert costs["tokens_forwarded"] == 40 * steps
    assert 0 < costs["tokens_recomputed"] < costs["tokens_forwarded"]
    for name in ("time.prefill", "time.decode", "time.other", "time.parts", "tokens_recomputed"):
        assert found["definitions"][name]
    assert "prefill 36.0, decode 12.0" in text


def test_b30_step_without_rows_is_other_time():
    times = StepTimes()
    times.on_step(StepReport(0, 0, 1, 0, 0, 0.5, {}, ()))
    split = times.split()
    assert (split.prefill, split.decode, split.other, split.num_steps) == (0.0, 0.0, 0.5, 1)


def test_b23_chat_template_that_the_tokenizer_lacks_is_one_message_before_weights_load(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("diffulex_bench.lm_eval_model.build_engine", None)
    config = make_settings(tmp_path, apply_chat_template=True)
    assert main(["--config", str(config)]) == 2
    text = capsys.readouterr().err
    assert "has no chat template" in text
    assert str(tmp_path / "model") in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


def test_b23_without_chat_template_prompts_go_as_they_are(tmp_path):
    outcome, engine, _ = run_with(make_settings(tmp_path), gold_answer)
    assert outcome.exit_code == 0
    assert engine.seen[-1][0] == "What is 0 + 0?\n"
