"""What the checkpoint decides: mask id, longest sequence, head counts; and which device runs it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.utils.checkpoint import CheckpointError, CheckpointFacts, read_checkpoint

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft

__all__ = ["apply_checkpoint"]


def apply_checkpoint(draft: Draft) -> CheckpointFacts | None:
    """The facts of the checkpoint folder, None if unreadable; settings that depend on them are resolved."""
    if draft.is_broken("model", "tokenizer_path"):
        return None
    try:
        facts = read_checkpoint(draft.values["model"], draft.values["tokenizer_path"])
    except CheckpointError as error:
        draft.refuse("model", str(error))
        return None
    if not draft.is_broken("mask_token_id", "model_name"):
        _resolve_mask_id(draft, facts)
    if not draft.is_broken("max_model_len", "max_num_batched_tokens"):
        _clamp_length(draft, facts)
    _check_heads(draft, facts)
    _compare_block_size(draft, facts)
    return facts


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
    elif draft.values["mask_token_id"] >= facts.vocab_size:
        draft.refuse(
            "mask_token_id",
            f"mask_token_id stands nowhere in {facts.path} (looked in {', '.join(facts.places_tried)}) "
            f"and the default {draft.values['mask_token_id']} is no id of its {facts.vocab_size}; write it",
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


def _compare_block_size(draft: Draft, facts: CheckpointFacts) -> None:
    """A default block size that is not the one the checkpoint was trained with is worth a warning."""
    trained, used = facts.config.get("block_size"), draft.values["block_size"]
    if isinstance(trained, int) and trained != used and "block_size" not in draft.explicit:
        draft.note(
            f"block_size is {used} by default but {facts.path} was trained with {trained}; write one of them"
        )
