"""Special token ids of a checkpoint, each with every place that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.utils.special_ids import config_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffulex.utils.special_ids import TokenizerFacts
    from diffulex_bench.inspection.folder import Folder

__all__ = ["SpecialId", "special_ids"]


@dataclass(frozen=True, slots=True)
class SpecialId:
    """One id: its role (mask, eos, bos, pad), the text of its token where known, and what names it."""

    role: str
    token_id: int
    text: str | None
    sources: tuple[str, ...]


def special_ids(folder: Folder, written_mask: int | None) -> tuple[SpecialId, ...]:
    """The ids the engine would use, in the order mask, eos, bos, pad; none without a readable tokenizer."""
    facts, tokenizer = folder.facts, folder.tokenizer
    if facts is None or tokenizer is None:
        return ()
    texts = {token_id: text for text, token_id in tokenizer.ids.items()}
    found = []
    if written_mask is not None:
        found.append(SpecialId("mask", written_mask, texts.get(written_mask), ("flag --mask-token-id",)))
    elif facts.mask_token_id is not None:
        token_id = facts.mask_token_id
        found.append(SpecialId("mask", token_id, texts.get(token_id), (facts.mask_source,)))
    roles: list[tuple[str, int | None]] = [("eos", one) for one in facts.eos_token_ids]
    roles += [("bos", facts.bos_token_id), ("pad", facts.pad_token_id)]
    for role, role_id in roles:
        if role_id is not None:
            sources = tuple(
                _sources(f"{role}_token", role_id, tokenizer, folder.config, facts.generation_config)
            )
            found.append(SpecialId(role, role_id, texts.get(role_id), sources))
    return tuple(found)


def _sources(
    role: str,
    token_id: int,
    tokenizer: TokenizerFacts,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> Iterator[str]:
    for file, text in tokenizer.special.get(role, ()):
        if tokenizer.ids.get(text) == token_id:
            yield f"{file}: {role}"
    stated = {
        "config.json": config_value(config, f"{role}_id"),
        "generation_config.json": generation_config.get(f"{role}_id") if role == "eos_token" else None,
    }
    for file, value in stated.items():
        if token_id in (value if isinstance(value, list) else [value]):
            yield f"{file}: {role}_id"
