"""What the checkpoint decides: mask id, block size, longest sequence; and rules on what it says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from diffulex.settings.decoding import DecodingSettings
from diffulex.settings.defaults import MODEL_DEFAULTS, STRATEGY_DEFAULTS
from diffulex.settings.rules import CANVAS_SIZE, SIZE_RULES, check_rules
from diffulex.settings.spec import settings_of
from diffulex.utils.checkpoint import CheckpointError, CheckpointFacts, read_checkpoint
from diffulex.utils.special_ids import config_value, fallback_of

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft

__all__ = ["apply_checkpoint"]


def apply_checkpoint(draft: Draft) -> CheckpointFacts | None:
    """The facts of the checkpoint folder, None if unreadable; settings that depend on them are resolved.

    The rules about sizes are asked here, unless the unreadable folder would have decided a size.
    """
    facts = _read(draft)
    if facts is not None:
        if not draft.is_broken("mask_token_id", "model_name"):
            _resolve_mask_id(draft, facts)
        if not draft.is_broken("max_model_len", "max_num_batched_tokens"):
            _clamp_length(draft, facts)
        _check_heads(draft, facts)
        _choose_block_size(draft, facts)
    if facts is not None or draft.is_demand("block_size"):
        check_rules(draft, SIZE_RULES)
        _check_pool(draft)
    return facts


def _read(draft: Draft) -> CheckpointFacts | None:
    if draft.is_broken("model", "tokenizer_path"):
        return None
    try:
        return read_checkpoint(draft.values["model"], draft.values["tokenizer_path"])
    except CheckpointError as error:
        draft.refuse("model", str(error))
        return None


def _resolve_mask_id(draft: Draft, facts: CheckpointFacts) -> None:
    if "mask_token_id" in draft.explicit:
        written = draft.values["mask_token_id"]
        if written >= facts.vocab_size:
            draft.refuse(
                "mask_token_id",
                f"mask_token_id ({written}) must be below the {facts.vocab_size} ids of {facts.path}",
            )
        elif facts.mask_token_id is not None and facts.mask_token_id != written:
            draft.note(
                f"mask_token_id={written} is used although {facts.mask_source} of {facts.path} "
                f"says {facts.mask_token_id}"
            )
        return
    if facts.mask_token_id is not None:
        draft.set("mask_token_id", facts.mask_token_id, f"checkpoint ({facts.mask_source})")
        if facts.mask_source.startswith("fallback") and facts.mask_token_id >= facts.tokenizer_size:
            draft.note(
                f"mask_token_id is {facts.mask_token_id}, the {facts.mask_source}, although the tokenizer of "
                f"{facts.path} knows only {facts.tokenizer_size} ids; write mask_token_id if it is another"
            )
    else:
        # The default is one family's id; another family has a word there.
        draft.refuse(
            "mask_token_id",
            f"mask_token_id stands nowhere in {facts.path} with one of its {facts.vocab_size} ids "
            f"(looked in {', '.join(facts.places_tried)}); write it",
        )


def _clamp_length(draft: Draft, facts: CheckpointFacts) -> None:
    length = draft.values["max_model_len"]
    if facts.max_position is not None and length > facts.max_position:
        draft.note(
            f"max_model_len {length} is lowered to {facts.max_position}, the longest {facts.path} can take",
            level=logging.WARNING if "max_model_len" in draft.explicit else logging.INFO,
        )
        draft.set(
            "max_model_len", facts.max_position, f"{length} lowered to the checkpoint's longest sequence"
        )
    budget, length = draft.values["max_num_batched_tokens"], draft.values["max_model_len"]
    if budget < length and draft.values["model_name"] != "diffusion_gemma":
        draft.refuse(
            "max_num_batched_tokens",
            f"max_num_batched_tokens ({budget}) must be at least max_model_len ({length}); "
            "raise it or lower max_model_len",
        )


def _check_heads(draft: Draft, facts: CheckpointFacts) -> None:
    """Tensor parallel ranks take whole heads; a KV head may be repeated on several ranks."""
    size = draft.values["tensor_parallel_size"]
    if (
        size == 1
        or not draft.is_demand("tensor_parallel_size")
        or draft.values["model_name"] not in MODEL_DEFAULTS
    ):
        return
    heads = facts.config.get("num_attention_heads", facts.config.get("n_heads"))
    kv_heads = facts.config.get("num_key_value_heads", facts.config.get("n_kv_heads")) or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return
    if heads % size or kv_heads % size:
        draft.refuse(
            "tensor_parallel_size",
            f"tensor_parallel_size ({size}) must divide the {heads} attention heads and the {kv_heads} "
            f"KV heads of {facts.path}; choose another size",
        )


def _choose_block_size(draft: Draft, facts: CheckpointFacts) -> None:
    """An unset block size becomes the one the checkpoint was trained with, and an unset page holds it."""
    strategy = draft.values["decoding_strategy"]
    row, trained, used = STRATEGY_DEFAULTS.get(strategy), facts.trained_block_size, draft.values["block_size"]
    if trained is None or draft.is_broken("block_size", "model_name", "decoding_strategy"):
        return
    if row is not None and not row.takes_trained_block:
        return
    if draft.is_demand("block_size"):
        if used != trained:
            text = f"block_size={used} is used although {facts.path} was trained with {trained}"
            draft.note(text, level=logging.INFO)
        return
    choices = settings_of(DecodingSettings)["block_size"].setting.choices
    if draft.values["model_name"] != "diffusion_gemma":
        choices = tuple(size for size in choices if size != CANVAS_SIZE)
    if trained not in choices:
        draft.note(
            f"block_size is {used} by default since {facts.path} was trained with {trained}, which is none "
            f"of {', '.join(map(str, choices))}; write one of them"
        )
        return
    origin = f"checkpoint ({_block_source(facts)})"
    draft.set("block_size", trained, origin)
    if draft.values["page_size"] < trained and not draft.is_demand("page_size"):
        draft.set("page_size", trained, f"raised to block_size, {origin}")


def _block_source(facts: CheckpointFacts) -> str:
    for key in ("block_size", "bd_size"):
        if config_value(facts.config, key) is not None:
            return f"config.json: {key}"
    return f"fallback of {fallback_of(facts.config)[0]}"


def _check_pool(draft: Draft) -> None:
    """A written pool that cannot hold one request of full length is worth a warning."""
    num_pages, length, page = (draft.values[name] for name in ("num_pages", "max_model_len", "page_size"))
    if "num_pages" not in draft.explicit or draft.is_broken("num_pages", "max_model_len", "page_size"):
        return
    needed = -(-length // page)
    if 0 < num_pages < needed:
        draft.note(
            f"num_pages={num_pages} cannot hold one request of max_model_len {length}, which takes {needed} "
            f"pages of {page} tokens; longer requests than the pool holds are refused"
        )
