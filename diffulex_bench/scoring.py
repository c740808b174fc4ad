"""Grade an answer: strict and flexible side by side, with the extracted text and how it was found.

Task YAMLs name the ``process_*`` functions; the bench calls the grader behind them once for each finished
request, so a sample's verdict is on disk before lm-eval has scored anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex_bench.answers import extract_flexible, extract_strict, parse_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Names of the two scores of number tasks, the headline first; task YAMLs list them in ``metric_list``.
STRICT = "strict_match"
FLEXIBLE = "flexible_match"


@dataclass(frozen=True, slots=True)
class Grade:
    """Verdict on one answer.

    Attributes:
        target: the expected answer as text.
        extracted: what was read from the answer, None when nothing was found.
        method: how it was found: ``hash_marker``, ``boxed``, ``answer_phrase``, ``last_number`` or ``none``.
        scores: score name -> 0.0 or 1.0.
    """

    target: str
    extracted: str | None
    method: str
    scores: dict[str, float]


def gold_number(answer: str) -> str:
    """The final answer of a GSM8K style solution: what follows the last ``####``, or the whole text."""
    return answer.rsplit("####", 1)[-1].strip()


def grade_number(doc: Mapping[str, Any], text: str) -> Grade:
    """Compare the number in ``text`` with ``doc["answer"]`` by value.

    Strict wants the number behind ``####``; flexible takes the best candidate of the text. A target that
    is no number is compared as text, so that a bad row scores 0 instead of ending the run.
    """
    target = gold_number(str(doc["answer"]))
    gold = parse_number(target)
    strict, flexible = extract_strict(text), extract_flexible(text)
    if gold is None:
        same = float(text.strip() == target)
        return Grade(target, text.strip() or None, "whole_text", {STRICT: same, FLEXIBLE: same})
    return Grade(
        target=target,
        extracted=flexible.text if flexible else None,
        method=flexible.method if flexible else "none",
        scores={
            STRICT: float(strict is not None and strict.value == gold),
            FLEXIBLE: float(flexible is not None and flexible.value == gold),
        },
    )


def process_number(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's ``process_results`` of number tasks: the scores of the first answer."""
    return grade_number(doc, str(results[0])).scores


def grader_of(process_results: object) -> Callable[[Mapping[str, Any], str], Grade] | None:
    """The grader behind a task's ``process_results``; None for a task whose scoring is not ours."""
    return grade_number if process_results is process_number else None
