"""Grade-school problems from reasoning-gym's ``gsm_symbolic``, split by question text.

A question belongs to the training, the validation or the test split by a checksum of its text alone. Whatever
seeds are drawn, no question of one split can occur in another. Seeds only choose which questions are drawn.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from diffulex_bench.tiny.tokenizer import TextEncoder

Split = Literal["train", "validation", "test"]

TRAIN_SEED: Final = 1_000
VALIDATION_SEED: Final = 2_000
TEST_SEED: Final = 3_000
BLOCK_SIZE: Final = 16
MAX_ROW_TOKENS: Final = 320
MAX_ANSWER_TOKENS: Final = 208

# One sixteenth of all questions each; the rest is for training.
_SPLIT_OF_CHECKSUM: Final[dict[int, Split]] = {0: "test", 1: "validation"}
_NUM_CHECKSUMS: Final = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """One generated problem; a model is given the question and one newline.

    Attributes:
        question: The question's text without a closing newline.
        answer: The result as a number string; a solution may write it differently (``18.0`` for ``18``).
        solution: The generator's worked solution, whose last line is ``#### number``.
        template: Index of the generator's template.
    """

    question: str
    answer: str
    solution: str
    template: int

    @property
    def prompt(self) -> str:
        """The text a model is given."""
        return f"{self.question}\n"


def test_problems(  # the name is no test of pytest, so its defaults are none of a fixture
    num: int,
    seed: int = TEST_SEED,  # noqa: PT028
    length_cut: bool = True,  # noqa: PT028
) -> list[Problem]:
    """Return ``num`` distinct problems of the test split; none of their questions is ever used in training.

    Args:
        num: Number of problems.
        seed: Start of the random draw.
        length_cut: Drop problems whose row of question, published solution and end token exceeds 320 tokens
            of the bundled tokenizer, or whose tokens from the block with the end of the prompt exceed 208.
    """
    return _distinct("test", num, seed, length_cut)


def validation_problems(num: int, seed: int = VALIDATION_SEED, length_cut: bool = True) -> list[Problem]:
    """Return ``num`` distinct problems of the validation split, for choices made while training."""
    return _distinct("validation", num, seed, length_cut)


def train_problems(num: int, seed: int = TRAIN_SEED) -> list[Problem]:
    """Return the first ``num`` problems of the training stream of a seed; questions may repeat."""
    return list(islice(problem_stream("train", seed), num))


def problem_stream(
    split: Split, seed: int, template_weights: Sequence[float] | None = None
) -> Iterator[Problem]:
    """Yield problems of a split without end; the same seed and weights give the same problems.

    Args:
        split: Which questions may be drawn.
        seed: Start of the random draw.
        template_weights: Relative frequency for each entry of `template_ids()`; all equal when left out.
    """
    random = Random(seed)
    generators = _generators()
    templates = list(generators)
    weights = list(template_weights) if template_weights is not None else [1.0] * len(templates)
    if len(weights) != len(templates):
        raise ValueError(
            f"template_weights ({len(weights)} entries) must have one for each of {len(templates)}"
        )
    while True:
        for template in random.choices(templates, weights, k=256):
            made = generators[template](random, 1.0)
            question = made["question"]
            if split_of(question) == split:
                yield Problem(question, str(made["answer"]), made["metadata"]["answer_cot"], template)


def split_of(question: str) -> Split:
    """Return the split that a question belongs to, from its text alone."""
    return _SPLIT_OF_CHECKSUM.get(zlib.crc32(question.encode()) % _NUM_CHECKSUMS, "train")


def template_ids() -> list[int]:
    """Return the indices of the usable templates, ascending."""
    return list(_generators())


def within_length_cut(problem: Problem, encoder: "TextEncoder") -> bool:
    """Return whether a problem's published text is short enough for the cut test set."""
    num_prompt = len(encoder.encode(problem.prompt))
    num_total = num_prompt + len(encoder.encode(problem.solution)) + 1
    window_start = num_prompt // BLOCK_SIZE * BLOCK_SIZE
    return num_total <= MAX_ROW_TOKENS and num_total - window_start <= MAX_ANSWER_TOKENS


def _distinct(split: Split, num: int, seed: int, length_cut: bool) -> list[Problem]:
    if num < 0:
        raise ValueError(f"num ({num}) must not be negative; ask for 0 or more problems")
    encoder = _bundled_encoder() if length_cut else None
    chosen: dict[str, Problem] = {}
    stream = problem_stream(split, seed)
    while len(chosen) < num:
        problem = next(stream)
        if encoder is None or within_length_cut(problem, encoder):
            chosen.setdefault(problem.question, problem)
    return list(chosen.values())


@cache
def _bundled_encoder() -> "TextEncoder":
    from diffulex_bench.tiny.tokenizer import TextEncoder

    return TextEncoder.load(Path(__file__).parent / "models" / "sdar")


@cache
def _generators() -> dict[int, Callable[[Random, float], dict[str, Any]]]:
    """Return the generator function of each usable template; the package is heavy, so it is imported here."""
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import (
        GSMSymbolicDataset,
        GSMSymbolicDatasetConfig,
        tasks_ok,
    )

    generators = GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=0, size=1)).generators
    return {template: generators[template] for template in sorted(tasks_ok)}
