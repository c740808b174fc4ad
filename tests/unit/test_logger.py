from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from diffulex.logger import LoggerMixin, get_logger, setup_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("diffulex", "diffulex_bench")]
    before = [(one.level, one.propagate, list(one.handlers)) for one in loggers]
    yield
    for one, (level, propagate, handlers) in zip(loggers, before, strict=True):
        for handler in set(one.handlers) - set(handlers):
            handler.close()
        one.setLevel(level)
        one.propagate = propagate
        one.handlers[:] = handlers


def test_names_stand_in_the_projects_tree() -> None:
    assert get_logger("diffulex.engine.engine").name == "diffulex.engine.engine"
    assert get_logger("diffulex_bench.main").name == "diffulex_bench.main"
    assert get_logger("my_tool").name == "diffulex.my_tool"
    assert get_logger().name == "diffulex"


def test_records_at_the_level_go_to_the_error_stream_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "run.log"
    setup_logger("INFO", log_file=path)
    get_logger("diffulex.a").info("seen %d", 1)
    get_logger("diffulex_bench.b").warning("seen too")
    get_logger("diffulex.a").debug("hidden")
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in (captured.err, path.read_text()):
        assert [line.split(" ", 1)[1] for line in text.splitlines()] == [
            "INFO diffulex.a: seen 1",
            "WARNING diffulex_bench.b: seen too",
        ]


def test_setting_up_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger()
    setup_logger(logging.DEBUG)
    get_logger("diffulex.a").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_handlers_of_others_stay() -> None:
    other = logging.NullHandler()
    logging.getLogger("diffulex").addHandler(other)
    setup_logger()
    setup_logger()
    handlers = logging.getLogger("diffulex").handlers
    assert other in handlers
    assert [type(one) for one in handlers if one is not other] == [logging.StreamHandler]


def test_the_root_logger_stays_as_it_is() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    setup_logger("DEBUG")
    assert (root.level, list(root.handlers)) == before


def test_other_ranks_show_warnings_only_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger(rank=3)
    get_logger("diffulex.a").info("hidden")
    get_logger("diffulex.a").warning("seen %s", "x")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING diffulex.a: [rank 3] seen x")


def test_a_record_shown_twice_is_marked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger(rank=1, log_file=tmp_path / "a.log")
    get_logger("diffulex.a").error("bad")
    assert capsys.readouterr().err.count("[rank 1]") == 1
    assert (tmp_path / "a.log").read_text().count("[rank 1]") == 1


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"level must be one of .*INFO.*, got 'LOUD'"):
        setup_logger("LOUD")
    assert setup_logger("debug").level == logging.DEBUG


def test_the_mixin_names_the_logger_after_the_class() -> None:
    class Worker(LoggerMixin):
        pass

    assert Worker().logger.name.endswith("Worker")
    assert Worker().logger.name.startswith("diffulex.")


def test_importing_the_package_configures_no_logging() -> None:
    code = (
        "import logging, diffulex.logger, diffulex.config; "
        "assert not logging.getLogger().handlers; "
        "assert not logging.getLogger('diffulex').handlers; "
        "assert logging.getLogger('diffulex').propagate"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
