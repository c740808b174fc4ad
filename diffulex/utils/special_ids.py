"""Special token ids and vocabulary size, read from a tokenizer's files without loading the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.utils.weight_files import CheckpointError, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True, slots=True)
class FamilyFallback:
    """What is known of a family whose files state less.

    `mask_token` is the text of a mask token that has no role in the tokenizer's files, `mask_token_id` the id
    of the published checkpoints, used when no file helps.
    """

    mask_token: str | None = None
    mask_token_id: int | None = None
    block_size: int | None = None


# By architecture or model_type, the former first. Some published SDAR folders state neither mask nor block;
# Dream and DreamReasoner share a model_type and have different ids; Stable-DiffCoder's model_type is "llama".
FALLBACKS: Mapping[str, FamilyFallback] = {
    "sdar": FamilyFallback(mask_token_id=151669, block_size=4),
    "sdar_moe": FamilyFallback(mask_token_id=151669, block_size=4),
    "DreamModel": FamilyFallback(mask_token_id=151666),
    "DreamForCausalLM": FamilyFallback(mask_token_id=151669, block_size=32),
    "Fast_dLLM_Qwen": FamilyFallback(mask_token="|<MASK>|", mask_token_id=151665, block_size=32),
    "llada": FamilyFallback(mask_token="<|mdm_mask|>"),
    "LLaDA2MoeModelLM": FamilyFallback(mask_token="<|mask|>", mask_token_id=156895, block_size=32),
    "llada2_moe": FamilyFallback(mask_token="<|mask|>", mask_token_id=156895, block_size=32),
    "StableDiffcoderForCausalLM": FamilyFallback(block_size=4),
}


def fallback_of(config: Mapping[str, Any]) -> tuple[str, FamilyFallback]:
    """What `config` calls its family, in words, and what is known of it; nothing of an unknown family."""
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name in FALLBACKS:
            return f"architecture {name}", FALLBACKS[name]
    model_type = str(config.get("model_type"))
    return f"model_type {model_type}", FALLBACKS.get(model_type, FamilyFallback())


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer folder as its files describe it.

    `ids` maps every token that a readable file lists to its id; `special` maps roles (`mask_token`,
    `eos_token`, `bos_token`, `pad_token`) to (file that says so, token string). `size` is the highest id + 1,
    0 when only a SentencePiece model is there.
    """

    folder: Path
    ids: Mapping[str, int]
    special: Mapping[str, tuple[tuple[str, str], ...]]
    size: int

    def special_id(self, role: str) -> int | None:
        """The id of a role's token, from the first file whose token is in the vocabulary."""
        return next((self.ids[token] for _, token in self.special.get(role, ()) if token in self.ids), None)


@dataclass(frozen=True, slots=True)
class MaskChoice:
    """The mask id found, what named it, the id the tokenizer names, and every place that was looked at."""

    token_id: int | None
    source: str
    tokenizer_id: int | None
    places_tried: tuple[str, ...]


def read_tokenizer_files(folder: Path) -> TokenizerFacts:
    """What the tokenizer files of `folder` say; a folder without any is a `CheckpointError`."""
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise CheckpointError(
            f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; "
            "complete the folder or set tokenizer_path"
        )
    config = _read_optional(folder / "tokenizer_config.json")
    ids: dict[str, int] = {}
    try:
        for pairs in (_vocab_ids(folder), _added_ids(folder, config)):
            ids.update(pairs)
        size = max(ids.values(), default=-1) + 1
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the vocabulary in {folder} does not have the form of a tokenizer's files; restore them"
        ) from error
    maps = {
        "special_tokens_map.json": _read_optional(folder / "special_tokens_map.json"),
        "tokenizer_config.json": config,
    }
    special = {
        role: tuple(
            (file, token) for file, entries in maps.items() if (token := _token_text(entries.get(role)))
        )
        for role in ("mask_token", "eos_token", "bos_token", "pad_token")
    }
    return TokenizerFacts(folder=folder, ids=ids, special=special, size=size)


def choose_mask_id(config: Mapping[str, Any], tokenizer: TokenizerFacts, vocab_size: int) -> MaskChoice:
    """The first id below `vocab_size` of: config.json, the tokenizer's mask token, the family's fallback."""
    tried: list[str] = []
    found: list[tuple[int, str]] = []
    for token_id, source, absent in _mask_candidates(config, tokenizer):
        if token_id is None:
            tried.append(f"{source} ({absent})")
        elif not 0 <= token_id < vocab_size:
            tried.append(f"{source} ({token_id} is outside the vocabulary of {vocab_size})")
        else:
            tried.append(f"{source} ({token_id})")
            found.append((token_id, source))
    token_id, source = found[0] if found else (None, "no source")
    return MaskChoice(token_id, source, tokenizer.special_id("mask_token"), tuple(tried))


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """`key` of a config.json, or of its `text_config`; None where both lack it."""
    value = config.get(key)
    text_config = config.get("text_config")
    return text_config.get(key) if value is None and isinstance(text_config, dict) else value


def as_token_id(value: object) -> int | None:
    """`value` when it is a whole number and no boolean."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mask_candidates(
    config: Mapping[str, Any], tokenizer: TokenizerFacts
) -> Iterator[tuple[int | None, str, str]]:
    stated = config_value(config, "mask_token_id")
    yield (
        as_token_id(stated),
        "config.json: mask_token_id",
        "absent" if stated is None else f"{stated!r} is no id",
    )
    named = dict(tokenizer.special.get("mask_token", ()))
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        source = f"{file}: mask_token"
        if file in named:
            yield (
                tokenizer.ids.get(named[file]),
                source,
                f"{named[file]!r} is not in the tokenizer's vocabulary",
            )
        else:
            yield None, source, "absent"
    family, fallback = fallback_of(config)
    if fallback.mask_token is not None:
        known = tokenizer.ids.get(fallback.mask_token)
        yield known, f"tokenizer: {fallback.mask_token!r} of {family}", "not in the tokenizer's vocabulary"
    yield fallback.mask_token_id, f"fallback of {family}", "none"


def _vocab_ids(folder: Path) -> Iterator[tuple[str, int]]:
    model = _read_optional(folder / "tokenizer.json").get("model", {})
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:  # Unigram: [[piece, score], ...], the index is the id
        yield from ((str(piece), token_id) for token_id, (piece, _) in enumerate(vocab))
    yield from _read_optional(folder / "vocab.json").items()
    if (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        yield from ((token, token_id) for token_id, token in enumerate(lines))


def _added_ids(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for entry in _read_optional(folder / "tokenizer.json").get("added_tokens", []):
        yield str(entry["content"]), int(entry["id"])
    yield from _read_optional(folder / "added_tokens.json").items()
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        yield str(entry["content"]), int(token_id)


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as a mapping with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
