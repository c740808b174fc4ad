from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.utils.output import NfeCounts, StepReport
from diffulex.utils.progress import GenerationProgress
from tests.unit.engine.test_outputs import make_output

if TYPE_CHECKING:
    import pytest


def report(step: int) -> StepReport:
    return StepReport(step, 2, 1, 16, 4, 0.1, {}, ())


def test_the_bar_counts_ended_requests_tokens_and_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    progress = GenerationProgress(3, enabled=True, label="prompts")
    with progress:
        progress.stepped(report(0))
        assert "0 tokens  0.00 TPF" in progress._bar.tasks[0].fields["figures"]
        progress.finished(make_output(token_ids=[5] * 6, nfe=NfeCounts(denoise=4)))
        progress.finished(make_output(token_ids=[5] * 3, nfe=NfeCounts(prefill=1, denoise=1)))
        progress.stepped(report(1))
        task = progress._bar.tasks[0]
    assert (task.completed, task.total) == (2, 3)
    assert "9 tokens  1.50 TPF" in task.fields["figures"]
    assert "2 running  1 waiting" in task.fields["figures"]
    assert capsys.readouterr().out == ""


def test_without_a_bar_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with GenerationProgress(1, enabled=False) as progress:
        progress.finished(make_output())
        progress.stepped(report(0))
    assert capsys.readouterr() == ("", "")
