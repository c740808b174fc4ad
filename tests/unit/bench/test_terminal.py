"""What a person sees: progress, summary, settings and log lines."""

import logging
from io import StringIO

from rich.console import Console

from diffulex.logger import get_logger
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.generation import plan_generation
from diffulex_bench.metrics import summarise_costs
from diffulex_bench.progress import RunProgress
from diffulex_bench.report import RunReport, TaskFacts, build_task_report
from diffulex_bench.run_logs import RunLogs
from diffulex_bench.summary import print_summary
from tests.support.bench import make_output, make_record


def terminal(**more):
    out = StringIO()
    return Console(file=out, width=200, **more), out


def test_progress_shows_samples_tokens_tpf_and_time_left_on_a_terminal():
    console, out = terminal(force_terminal=True)
    with RunProgress(4, console=console) as progress:
        progress.on_start("toy", 4)
        progress.on_sample(make_record(make_output(tokens=10)), [])
        progress.on_sample(make_record(make_output(tokens=20), doc_id=1), [])
        facts = progress.facts()
    assert progress.num_done == 2
    assert "30 tok" in facts
    assert "TPF 3.00" in facts
    assert facts.endswith("left")
    assert "2/4" in out.getvalue()


def test_progress_writes_nothing_into_a_pipe_within_ten_seconds():
    console, out = terminal()
    with RunProgress(2, console=console) as progress:
        progress.on_start("toy", 2)
        progress.on_sample(make_record(), [])
    assert out.getvalue() == ""


def test_summary_holds_what_a_reader_needs(tmp_path):
    records = [
        make_record(make_output("#### 1", tokens=12)),
        make_record(
            make_output("", tokens=0, reason="max_nfe_reached"),
            doc_id=1,
            scores={"strict_match": 0.0, "flexible_match": 0.0},
        ),
    ]
    plan = plan_generation(EvalSettings(), frozenset(), {})
    task = build_task_report(TaskFacts(3, 10, plan), records, None, [])
    report = RunReport(
        "partial",
        "interrupted by the user",
        "bundled:x",
        "sdar",
        "multi_bd",
        {"toy": task},
        summarise_costs(records),
    )
    console, out = terminal()
    print_summary(report, tmp_path, saved=True, console=console)
    text = out.getvalue()
    for part in (
        "toy", "multi_bd", "2 of 3", "strict_match 50.0 % [9.5, 90.5]", "1.20", "5.0",
        "eos_token_generated 1", "max_nfe_reached 1", "empty answers 1", "answers cut by a limit 1",
        "partial results: interrupted by the user", str(tmp_path),
    ):  # fmt: skip
        assert part in text, part


def test_lines_of_before_the_run_folder_stand_at_the_top_of_its_log(tmp_path):
    console, out = terminal()
    log = tmp_path / "run.log"
    with RunLogs(console) as logs:
        get_logger("diffulex_bench.test").warning("early [not markup]")
        logging.getLogger("lm_eval").warning("foreign")
        logs.move_to(log)
        get_logger("diffulex_bench.test").debug("detail")
        get_logger("diffulex.test").debug("a line of every forward pass")
        assert logs.path == log
    lines = log.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["early [not markup]", "foreign", "detail"]
    assert out.getvalue() == "warning: early [not markup]\n"


def test_logging_is_left_as_it_was_found():
    logger = logging.getLogger("diffulex_bench")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with RunLogs(Console(file=StringIO())):
        assert logger.propagate is False
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
