"""Rules across settings, as a table of small functions that answer with a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.settings.draft import Draft, Values

__all__ = ["CANVAS_SIZE", "FIRST_RULES", "RULES", "SIZE_RULES", "Rule", "check_rules"]

# The one block size beyond 32; only a model that denoises canvases has blocks of it.
CANVAS_SIZE: Final = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken` answers with the sentence for values that break the rule, and None for others.

    A rule is asked only when the settings it reads are in order each by itself; the first of `names` is the
    one it is reported under.
    """

    names: tuple[str, ...]
    broken: Callable[[Values], str | None]


def _model_given(values: Values) -> str | None:
    return (
        None if values["model"] else "model must be the folder of a checkpoint, got ''; give model=<folder>"
    )


def _block_fits_page(values: Values) -> str | None:
    block, page = values["block_size"], values["page_size"]
    if block <= page:
        return None
    return f"block_size ({block}) must not exceed page_size ({page}); raise page_size or lower block_size"


def _canvas_size_only_for_canvases(name: str) -> Callable[[Values], str | None]:
    def broken(values: Values) -> str | None:
        if values[name] != CANVAS_SIZE or values["model_name"] == "diffusion_gemma":
            return None
        return f"{name} must be one of 4, 8, 16, 32 unless model_name is diffusion_gemma, got {CANVAS_SIZE}"

    return broken


def _pages_positive(values: Values) -> str | None:
    return "num_pages must be -1 or at least 1, got 0" if values["num_pages"] == 0 else None


def _budget_holds_window(values: Values) -> str | None:
    block, budget = values["block_size"], values["max_num_batched_tokens"]
    longest = -(-values["max_model_len"] // block) * block
    window = min(block * values["buffer_size"], longest)
    if budget >= window:
        return None
    return (
        f"max_num_batched_tokens ({budget}) must hold the open blocks of one request "
        f"(block_size {block} x buffer_size {values['buffer_size']} = {window}); raise it"
    )


def _dual_cache_buffer(values: Values) -> str | None:
    if values["decoding_strategy"] != "fast_dllm_v2" or values["buffer_size"] > 1:
        return None
    return "buffer_size must be above 1 with decoding_strategy='fast_dllm_v2', got 1; 4 is the model's own"


def _lora_has_path(values: Values) -> str | None:
    if values["use_lora"] and not values["lora_path"]:
        return "lora_path must be the folder of the adapter when use_lora is True, got ''"
    return None


def _temperatures_in_order(values: Values) -> str | None:
    low, high = values["diffusion_gemma_t_min"], values["diffusion_gemma_t_max"]
    if low < high:
        return None
    return f"diffusion_gemma_t_min ({low}) must be below diffusion_gemma_t_max ({high}); lower it"


def _devices_differ(values: Values) -> str | None:
    ids = values["device_ids"]
    if len(set(ids)) == len(ids):
        return None
    return f"device_ids must name each device once, got {list(ids)}"


FIRST_RULES: Final = (
    Rule(("model",), _model_given),
    Rule(("block_size", "model_name"), _canvas_size_only_for_canvases("block_size")),
    Rule(("page_size", "model_name"), _canvas_size_only_for_canvases("page_size")),
    Rule(("num_pages",), _pages_positive),
    Rule(("buffer_size", "decoding_strategy"), _dual_cache_buffer),
    Rule(("lora_path", "use_lora"), _lora_has_path),
    Rule(("diffusion_gemma_t_min", "diffusion_gemma_t_max"), _temperatures_in_order),
    Rule(("device_ids",), _devices_differ),
)
# Rules about sizes that a checkpoint may decide.
SIZE_RULES: Final = (
    Rule(("block_size", "page_size"), _block_fits_page),
    Rule(("max_num_batched_tokens", "block_size", "buffer_size", "max_model_len"), _budget_holds_window),
)
RULES: Final = (*FIRST_RULES, *SIZE_RULES)


def check_rules(draft: Draft, rules: Sequence[Rule]) -> None:
    """Record every rule that the values break."""
    for rule in rules:
        if not draft.is_broken(*rule.names) and (text := rule.broken(draft.values)) is not None:
            draft.refuse(rule.names[0], text)
