"""Accuracy and forwards of a network on held-out problems."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diffulex_bench.tiny.data import Problem, within_length_cut
from diffulex_bench.tiny.decode import Decoded, DecodeSettings, decode
from diffulex_bench.tiny.network import Network
from diffulex_bench.tiny.tokenizer import TextEncoder

_RESULT = re.compile(r"#### *[€£$]?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decoded problem."""

    problem: Problem
    text: str
    decoded: Decoded
    is_correct: bool
    has_number: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over a set of problems; ``tpf`` is answer tokens with the end token over denoising forwards."""

    num_problems: int
    accuracy: float
    half_interval: float
    tpf: float
    forwards_per_problem: float
    no_number: float
    unfinished: float

    def as_dict(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def evaluate(
    network: Network,
    problems: Sequence[Problem],
    encoder: TextEncoder,
    settings: DecodeSettings,
    batch_size: int = 500,
) -> list[Outcome]:
    """Return the outcome of every problem, in order; batches hold prompts of similar length."""
    prompts = [encoder.encode(problem.prompt) for problem in problems]
    order = sorted(range(len(problems)), key=lambda index: len(prompts[index]))
    outcomes: dict[int, Outcome] = {}
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size]
        for index, decoded in zip(
            chosen, decode(network, [prompts[i] for i in chosen], settings), strict=True
        ):
            problem, text = problems[index], encoder.decode(decoded.ids)
            result = result_of(text)
            outcomes[index] = Outcome(
                problem=problem,
                text=text,
                decoded=decoded,
                is_correct=result is not None and result == float(problem.answer.replace(",", "")),
                has_number=result is not None,
                is_cut=not within_length_cut(problem, encoder),
            )
    return [outcomes[index] for index in range(len(problems))]


def result_of(text: str) -> float | None:
    """Return the number behind the last ``####``, none when there is none."""
    found = _RESULT.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Return the figures of the outcomes; the interval is 95 %, by normal approximation."""
    num = len(outcomes)
    accuracy = sum(outcome.is_correct for outcome in outcomes) / num
    num_forwards = sum(outcome.decoded.num_forwards for outcome in outcomes)
    num_tokens = sum(len(outcome.decoded.ids) + outcome.decoded.is_finished for outcome in outcomes)
    return Summary(
        num_problems=num,
        accuracy=accuracy,
        half_interval=1.96 * math.sqrt(accuracy * (1 - accuracy) / num),
        tpf=num_tokens / num_forwards,
        forwards_per_problem=num_forwards / num,
        no_number=sum(not outcome.has_number for outcome in outcomes) / num,
        unfinished=sum(not outcome.decoded.is_finished for outcome in outcomes) / num,
    )


def by_template(outcomes: Sequence[Outcome]) -> dict[int, tuple[int, int]]:
    """Return ``(correct, all)`` for each template that occurs, ascending."""
    counts: dict[int, tuple[int, int]] = {}
    for outcome in outcomes:
        correct, total = counts.get(outcome.problem.template, (0, 0))
        counts[outcome.problem.template] = (correct + outcome.is_correct, total + 1)
    return dict(sorted(counts.items()))
