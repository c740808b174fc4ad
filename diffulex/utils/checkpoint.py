"""Open a Hugging Face style checkpoint folder: configuration, special ids and weights, without remote code.

`diffulex.config.Config` reads the facts before anything else loads; the model loader and the tokenizer use
the same facts. Nothing here imports torch until a tensor is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.utils.special_ids import (
    TokenizerFacts,
    as_token_id,
    choose_mask_id,
    config_value,
    fallback_of,
    read_tokenizer_files,
)
from diffulex.utils.weight_files import (
    CheckpointError,
    TensorHeader,
    find_weight_files,
    iter_tensors,
    read_headers,
    read_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

__all__ = [
    "CheckpointError",
    "CheckpointFacts",
    "TensorHeader",
    "iter_weights",
    "read_checkpoint",
    "read_facts",
    "weight_headers",
]


@dataclass(frozen=True)
class CheckpointFacts:
    """What the files of a checkpoint folder say, before any weight is loaded.

    Made by `read_checkpoint`, changed by nobody. `vocab_size` counts the rows of the embedding,
    `tokenizer_size` the ids the tokenizer knows, `trained_block_size` the tokens of the family's block.
    `mask_token_id` is None when no place of `places_tried` names an id of the vocabulary; `mask_source` is
    the place that did. `tokenizer_mask_id` is what the tokenizer files name on their own, for comparison
    with an id that a user writes.
    """

    path: Path
    tokenizer_path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    vocab_size: int
    tokenizer_size: int
    max_position: int | None
    trained_block_size: int | None
    mask_token_id: int | None
    mask_source: str
    tokenizer_mask_id: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    weight_files: tuple[Path, ...]
    torch_dtype: str | None
    places_tried: tuple[str, ...]

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of config.json."""
        value = self.config.get("architectures")
        return tuple(str(name) for name in value) if isinstance(value, list) else ()


def read_checkpoint(model_dir: str | Path, tokenizer_dir: str | Path | None = None) -> CheckpointFacts:
    """The facts of the checkpoint folder `model_dir`, its tokenizer read from `tokenizer_dir` when given.

    Raises:
        CheckpointError: the folder, its config.json, a tokenizer or the weights are missing or damaged.
    """
    facts = read_facts(model_dir, tokenizer_dir)
    return replace(facts, weight_files=find_weight_files(facts.path))


def read_facts(model_dir: str | Path, tokenizer_dir: str | Path | None = None) -> CheckpointFacts:
    """What `read_checkpoint` reads, without looking for weights: `weight_files` is empty.

    Raises:
        CheckpointError: the folder, its config.json or a tokenizer is missing or damaged.
    """
    folder = _existing_folder(model_dir, "model")
    tokenizer_folder = folder if tokenizer_dir is None else _existing_folder(tokenizer_dir, "tokenizer_path")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; point model to a checkpoint folder")
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.is_file() else {}
    tokenizer = read_tokenizer_files(tokenizer_folder)
    # LLaDA's embedding may have more rows than its vocabulary.
    vocab_size = _positive(config, folder, "embedding_size", "vocab_size")
    if vocab_size is None:
        raise CheckpointError(f"{folder / 'config.json'} states no vocab_size; restore the file")
    mask = choose_mask_id(config, tokenizer, vocab_size)
    return CheckpointFacts(
        path=folder,
        tokenizer_path=tokenizer_folder,
        config=config,
        generation_config=generation_config,
        vocab_size=vocab_size,
        tokenizer_size=tokenizer.size or vocab_size,
        max_position=_positive(config, folder, "max_position_embeddings", "max_sequence_length"),
        trained_block_size=_trained_block_size(config, folder),
        mask_token_id=mask.token_id,
        mask_source=mask.source,
        tokenizer_mask_id=mask.tokenizer_id,
        eos_token_ids=_eos_ids(tokenizer, config, generation_config, vocab_size),
        bos_token_id=_role_id("bos_token", tokenizer, config),
        pad_token_id=_role_id("pad_token", tokenizer, config),
        weight_files=(),
        torch_dtype=_dtype_name(config),
        places_tried=mask.places_tried,
    )


def weight_headers(facts: CheckpointFacts) -> dict[str, TensorHeader]:
    """Names, shapes and sizes of all weights, read from the file headers only; damaged files are named."""
    return read_headers(facts.weight_files)


def iter_weights(facts: CheckpointFacts) -> Iterator[tuple[str, Tensor]]:
    """Names and memory-mapped tensors of all weights, one at a time, shard by shard."""
    return iter_tensors(facts.weight_files)


def _existing_folder(given: str | Path, option: str) -> Path:
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{option} must be a checkpoint folder, {given} is a file; give the folder that holds it"
        )
    text = str(given)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{option} must be a local folder, {text!r} is none; if it is a hub id, download the repository "
            "first (hf download) and give the folder"
        )
    raise CheckpointError(f"{option} must be an existing folder, {text!r} does not exist; check the path")


def _positive(config: Mapping[str, Any], folder: Path, *keys: str) -> int | None:
    for key in keys:
        value = config_value(config, key)
        if value is None:
            continue
        number = as_token_id(value)
        if number is None or number < 1:
            raise CheckpointError(
                f"{key} in {folder / 'config.json'} must be a positive whole number, it is {value!r}"
            )
        return number
    return None


def _trained_block_size(config: Mapping[str, Any], folder: Path) -> int | None:
    stated = _positive(config, folder, "block_size", "bd_size")
    return fallback_of(config)[1].block_size if stated is None else stated


def _eos_ids(
    tokenizer: TokenizerFacts,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    vocab_size: int,
) -> tuple[int, ...]:
    """Ids of the tokenizer, config.json and generation_config.json, each once, in that order."""
    stated: list[object] = [tokenizer.special_id("eos_token")]
    for value in (config_value(config, "eos_token_id"), generation_config.get("eos_token_id")):
        stated.extend(value if isinstance(value, list) else [value])
    ids = (as_token_id(value) for value in stated)
    return tuple(
        dict.fromkeys(token_id for token_id in ids if token_id is not None and 0 <= token_id < vocab_size)
    )


def _role_id(role: str, tokenizer: TokenizerFacts, config: Mapping[str, Any]) -> int | None:
    named = tokenizer.special_id(role)
    return as_token_id(config_value(config, f"{role}_id")) if named is None else named


def _dtype_name(config: Mapping[str, Any]) -> str | None:
    """`torch_dtype`, or `dtype` as newer files spell it, without a leading "torch."."""
    value = config_value(config, "torch_dtype") or config_value(config, "dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None
