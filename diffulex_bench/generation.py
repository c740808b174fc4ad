"""Which generation arguments one request gets, and where each came from.

Precedence: a value the user wrote in ``eval`` (YAML or flag) > the task's ``generation_kwargs`` > the default
of the ``eval`` section. Stop strings come from the task alone; nothing is added to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.sampling_params import SamplingParams
from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex_bench.config import EvalSettings

#: Names under which tasks ask for an answer length, in lm-eval's order of priority.
MAX_TOKENS_ALIASES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
#: ``eval`` fields that reach the engine under the same name in `SamplingParams`.
FORWARDED = (
    "temperature", "max_tokens", "max_nfe", "max_repetition_run", "ignore_eos",
    "top_p", "top_k", "confidence",
)  # fmt: skip
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_HANDLED = {*FORWARDED, *MAX_TOKENS_ALIASES, "until", "do_sample"}
_AS_TYPE = {
    "temperature": float, "top_p": float, "max_tokens": int, "max_nfe": int, "max_repetition_run": int,
    "top_k": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Resolved arguments of a request.

    Attributes:
        values: `FORWARDED` name -> value.
        origins: the same names -> ``eval``, ``task`` or ``default``.
        stops: stop strings, in the task's order.
        ignored: keys of the task that nothing here understands.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    stops: tuple[str, ...]
    ignored: tuple[str, ...]

    def sampling_params(
        self, *, seed: int, stops: Sequence[str], stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """The engine's parameters; stop strings are searched behind a leading thinking part only."""
        return SamplingParams(
            **self.values,
            seed=seed,
            stop=tuple(stops),
            stop_token_ids=tuple(stop_token_ids),
            stop_after=THINK_CLOSE if stops else None,
        )


def plan_generation(
    settings: EvalSettings, explicit: frozenset[str], task_kwargs: Mapping[str, Any], task: str = "the task"
) -> GenerationPlan:
    """Merges the ``eval`` section with a task's ``generation_kwargs``, which stay unchanged.

    ``do_sample: false`` in a task means temperature 0, as in lm-eval.

    Raises:
        BenchError: a task value that has the wrong type or is out of bounds, named with its task.
    """
    from_task = _task_values(task_kwargs, task)
    values, origins = {}, {}
    for name in FORWARDED:
        written = getattr(settings, name)
        if name in explicit or name not in from_task:
            values[name] = written
            origins[name] = "eval" if name in explicit else "default"
        else:
            values[name], origins[name] = from_task[name], "task"
    plan = GenerationPlan(
        values=values,
        origins=origins,
        stops=stop_strings(task_kwargs.get("until"), task),
        ignored=tuple(sorted(key for key in task_kwargs if key not in _HANDLED)),
    )
    try:
        plan.sampling_params(seed=0, stops=plan.stops)
    except ValueError as error:
        raise BenchError(f"generation arguments of {task} are not usable: {error}") from error
    return plan


def stop_strings(until: object, task: str = "the task") -> tuple[str, ...]:
    """``until`` as a tuple without repeats: a string is one stop, None and empty strings are no stop."""
    listed = [until] if isinstance(until, str) else list(until) if isinstance(until, list | tuple) else until
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise BenchError(f"until of {task} must be a string or a list of strings, not {until!r}")
    return tuple(dict.fromkeys(stop for stop in listed if stop))


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the earliest occurrence of any stop string."""
    hits = [offset for stop in stops if (offset := text.find(stop)) >= 0]
    return text[: min(hits)] if hits else text


def split_thinking(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """A leading ``<think>...</think>`` part and the visible answer behind it, white space between removed.

    ``opened`` says that the prompt already ended in ``<think>``. A thinking part that was never closed leaves
    no visible answer. Text that merely mentions the tags further on is not touched.
    """
    inner = text.lstrip()
    if inner.startswith(THINK_OPEN):
        inner = inner[len(THINK_OPEN) :]
    elif not opened:
        return None, text
    thinking, closed, answer = inner.partition(THINK_CLOSE)
    return thinking, answer.lstrip() if closed else ""


def _task_values(task_kwargs: Mapping[str, Any], task: str) -> dict[str, Any]:
    """What the task asks for under our names; absent and null keys are left out."""
    given = {key: value for key, value in task_kwargs.items() if value is not None}
    found = {name: given[name] for name in FORWARDED if name in given}
    lengths = [given[alias] for alias in MAX_TOKENS_ALIASES if alias in given]
    if lengths:
        found["max_tokens"] = lengths[0]
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    return {name: _convert(name, value, task) for name, value in found.items()}


def _convert(name: str, value: object, task: str) -> object:
    kind = _AS_TYPE.get(name)
    if kind is None:
        return value
    try:
        converted = kind(value)
        exact = not isinstance(converted, int) or converted == float(str(value))
    except (TypeError, ValueError) as error:
        raise BenchError(f"{name} of {task} must be {kind.__name__}, not {value!r}") from error
    if not exact:
        raise BenchError(f"{name} of {task} must be a whole number, not {value!r}")
    return converted
