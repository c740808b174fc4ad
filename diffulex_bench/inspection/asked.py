"""The settings an inspection is asked about, resolved by the engine's own rules for one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from diffulex.config import DEFAULTS, ENGINE_SETTINGS, ConfigError
from diffulex.settings.availability import AVAILABLE_MODELS, AVAILABLE_STRATEGIES, FEATURES
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS
from diffulex.settings.draft import CLASS_DEFAULT, Draft, Hardware
from diffulex.settings.resolve import resolve_settings
from diffulex_bench.inspection.published import Published, find_published

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.utils.checkpoint import CheckpointFacts

__all__ = ["ASKED", "Asked", "Option", "options_of", "resolve_asked", "runs_now"]

#: Settings that change what an inspection says, each a flag of the command.
ASKED: Final = (
    "model_name",
    "tokenizer_path",
    "mask_token_id",
    "decoding_strategy",
    "block_size",
    "buffer_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_reqs",
    "page_size",
    "num_pages",
    "gpu_memory_utilization",
    "dtype",
    "tensor_parallel_size",
)
_SUB_BLOCK = 8
_LARGEST_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Option:
    """One model name with one strategy that its family runs, and whether this version runs it."""

    model_name: str
    strategy: str
    is_default: bool
    runs_now: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """Resolved settings.

    `published` is the bundled configuration they are based on, `flags` what a command line must add to it,
    and `notes` what was changed and why.
    """

    model_name: str
    strategy: str
    block_size: int
    buffer_size: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_reqs: int
    gpu_memory_utilization: float
    dtype: str
    tensor_parallel_size: int
    mask_token_id: int | None
    published: Published | None
    flags: Mapping[str, Any]
    notes: tuple[str, ...]


def runs_now(model_name: str, strategy: str) -> bool:
    """Whether this version runs the family with the strategy and the family's own sampling mode."""
    mode = MODEL_DEFAULTS[model_name].settings.get("sampling_mode", DEFAULTS["sampling_mode"])
    has_mode = all(one.ready or mode in one.plain for one in FEATURES if one.name == "sampling_mode")
    return model_name in AVAILABLE_MODELS and strategy in AVAILABLE_STRATEGIES and has_mode


def options_of(model_name: str) -> list[Option]:
    """The strategies of a family, its own first."""
    row = MODEL_DEFAULTS[model_name]
    ordered = sorted(row.strategies, key=lambda one: one != row.default_strategy)
    return [
        Option(model_name, one, one == row.default_strategy, runs_now(model_name, one)) for one in ordered
    ]


def resolve_asked(
    path: str,
    names: tuple[str, ...],
    facts: CheckpointFacts | None,
    written: Mapping[str, Any],
    origins: Mapping[str, str],
    *,
    is_bundled: bool = False,
) -> Asked:
    """What holds for a run of the checkpoint in `path`, which `names` can read, with the written settings.

    Without a written one the strategy is the first of the family's that this version runs, and the block is
    the one the checkpoint was trained with. Other values are those of the bundled configuration of family,
    strategy and block, where there is one.

    Raises:
        ConfigError: lists every written value that cannot be used.
    """
    given = {"model_name": names[0] if names else DEFAULTS["model_name"], **written}
    name = given["model_name"]
    if name in MODEL_DEFAULTS and "decoding_strategy" not in given:
        options = options_of(name)
        given["decoding_strategy"] = next((one for one in options if one.runs_now), options[0]).strategy
    strategy = given.get("decoding_strategy", "")
    notes: list[str] = []
    blocks = _trained_blocks(facts, strategy, notes) if "block_size" not in given else {}
    published = find_published(
        name, strategy, given.get("block_size", blocks.get("block_size")), is_bundled=is_bundled
    )
    base = {key: value for key, value in (published.engine if published else {}).items() if key in ASKED}
    implied: dict[str, Any] = _edit_mode(name, strategy)
    given = {"model": path, "tensor_parallel_size": 1, **base, **implied, **given}
    draft = Draft(
        {**DEFAULTS, **blocks, **given},
        set(given),
        {one: origins.get(one, CLASS_DEFAULT) for one in ENGINE_SETTINGS},
        DEFAULTS,
        lambda: Hardware(has_cuda=False, device_count=0, has_vllm=False),
    )
    resolve_settings(draft, ENGINE_SETTINGS)
    if draft.problems:
        raise ConfigError(draft.sentences())
    if facts is not None:
        _fit_canvas(draft, facts)
        implied |= _fit_lengths(draft, facts, notes, {**base, **written})
    values = draft.values
    return Asked(
        model_name=values["model_name"],
        strategy=values["decoding_strategy"],
        **{one: values[one] for one in _COPIED},
        mask_token_id=written.get("mask_token_id"),
        published=published,
        flags={**implied, **{one: value for one, value in written.items() if value is not None}},
        notes=(*notes, *(text for _, text in draft.notes)),
    )


_COPIED: Final = (
    "block_size",
    "buffer_size",
    "page_size",
    "num_pages",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_reqs",
    "gpu_memory_utilization",
    "dtype",
    "tensor_parallel_size",
)


def _trained_blocks(facts: CheckpointFacts | None, strategy: str, notes: list[str]) -> dict[str, int]:
    """The trained block as settings; fast_dllm_v2 opens it as several smaller ones."""
    trained = facts.trained_block_size if facts else None
    if trained is None or strategy == "diffusion_gemma":
        return {}
    if strategy == "fast_dllm_v2" and trained > 1:
        block = min(_SUB_BLOCK, trained // 2)
        return {"block_size": block, "buffer_size": trained // block}
    if trained > _LARGEST_BLOCK:
        notes.append(f"trained with blocks of {trained}; {_LARGEST_BLOCK} is the largest block that runs")
    return {"block_size": min(trained, _LARGEST_BLOCK)}


def _edit_mode(name: str, strategy: str) -> dict[str, Any]:
    """The sampling mode to write, when the strategy cannot work with the family's own."""
    row = STRATEGY_DEFAULTS.get(strategy)
    if row is None or name not in MODEL_DEFAULTS:
        return {}
    mode = MODEL_DEFAULTS[name].settings.get("sampling_mode", DEFAULTS["sampling_mode"])
    return {} if mode in row.sampling_modes else {"sampling_mode": row.sampling_modes[0]}


def _fit_canvas(draft: Draft, facts: CheckpointFacts) -> None:
    """A canvas is one block and one page, whatever its size."""
    canvas = facts.config.get("canvas_length")
    if isinstance(canvas, int) and draft.values["decoding_strategy"] == "diffusion_gemma":
        draft.set("block_size", canvas, "checkpoint")
        draft.set("page_size", canvas, "checkpoint")


def _fit_lengths(
    draft: Draft, facts: CheckpointFacts, notes: list[str], written: Mapping[str, Any]
) -> dict[str, int]:
    """No length above the checkpoint's; returns a token budget to write when one request needs more."""
    longest, length = facts.max_position, draft.values["max_model_len"]
    if longest is not None and length > longest:
        draft.set("max_model_len", longest, "checkpoint")
        if "max_model_len" in written:
            notes.append(
                f"max_model_len {length} is lowered to {longest}, the longest this checkpoint can take"
            )
    length, budget = draft.values["max_model_len"], draft.values["max_num_batched_tokens"]
    if budget >= length or "max_num_batched_tokens" in written:
        return {}
    draft.set("max_num_batched_tokens", length, "max_model_len")
    return {"max_num_batched_tokens": length}
