"""`Inspection`: all that ``diffulex-bench inspect`` knows of a folder, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex_bench.inspection.asked import Asked, Option, options_of, resolve_asked, runs_now
from diffulex_bench.inspection.command import ready_command
from diffulex_bench.inspection.families import Recognition, recognise
from diffulex_bench.inspection.fit import ITEM_SIZES, Fit, Need, cache_shape, places, weigh
from diffulex_bench.inspection.folder import Folder, read_folder
from diffulex_bench.inspection.ids import SpecialId, special_ids
from diffulex_bench.inspection.shape import ModelShape, ModelSize, measure, read_shape
from diffulex_bench.tiny import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Inspection", "inspect_folder"]


@dataclass(frozen=True, slots=True)
class Inspection:
    """The answer of one inspection.

    `problems` are faults that stand in the way of a run, `notes` what is good to know. `vocab_size` counts
    rows of the embedding, `tokenizer_size` ids of the tokenizer. Sizes are bytes; `fits` is empty when too
    little is known to weigh the model.
    """

    model: str
    recognition: Recognition
    options: tuple[Option, ...]
    asked: Asked
    weight_files: tuple[str, ...]
    size: ModelSize
    shape: ModelShape
    special_ids: tuple[SpecialId, ...]
    chat_template: str | None
    trained_block_size: int | None
    max_position: int | None
    checkpoint_dtype: str | None
    vocab_size: int | None
    tokenizer_size: int | None
    fits: tuple[Fit, ...]
    command: str | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one position, whole model."""
        return cache_shape(self.shape.layers, ITEM_SIZES[dtype]).bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        """Everything as data that JSON can hold."""
        content = asdict(self)
        content["weight_bytes"] = {name: self.size.used * size for name, size in ITEM_SIZES.items()}
        content["kv_bytes_per_token"] = {name: self.kv_bytes_per_token(name) for name in ITEM_SIZES}
        content["kv_bytes_per_page"] = {
            name: self.kv_bytes_per_token(name) * self.asked.page_size for name in ITEM_SIZES
        }
        content["asked"]["published"] = self.asked.published.name if self.asked.published else None
        content["shape"]["layers"] = [one._asdict() for one in self.shape.layers]
        content["shape"].pop("problems")
        content["size"]["by_dtype"] = {
            name: {"parameters": count, "bytes": num_bytes}
            for name, (count, num_bytes) in self.size.by_dtype.items()
        }
        return content


def inspect_folder(
    label: str, path: str, written: Mapping[str, Any], origins: Mapping[str, str]
) -> Inspection:
    """Inspects the folder `path`, which the user calls `label`, under the written settings.

    Raises:
        CheckpointError: there is no such folder.
        ConfigError: a written setting cannot be used.
    """
    folder = read_folder(path, written.get("tokenizer_path"))
    facts = folder.facts
    recognition = recognise(folder.config, folder.headers.keys(), folder.path.resolve().name)
    asked = resolve_asked(
        path, recognition.names, facts, written, origins, is_bundled=label.startswith(PREFIX)
    )
    shape = read_shape(folder.config, folder.headers, is_complete=folder.has_all_weights)
    size = measure(folder.headers, shape.experts)
    vocab_size = facts.vocab_size if facts else shape.embedding_rows
    problems = [
        *folder.problems,
        *_family_problems(recognition, asked, folder),
        *shape.problems,
        *_vocabulary_problems(folder, shape, asked),
        *_rank_problems(shape, asked.tensor_parallel_size),
    ]
    names = (asked.model_name,) if "model_name" in written else recognition.names
    fits: tuple[Fit, ...] = ()
    if shape.layers and vocab_size and folder.has_all_weights and not problems:
        need = Need(size, shape.layers, vocab_size, asked, asked.tensor_parallel_size)
        dtype = facts.torch_dtype if facts else None
        fits = tuple(weigh(need, place, asked.dtype, dtype) for place in places())
    return Inspection(
        model=label,
        recognition=recognition,
        options=tuple(option for name in names for option in options_of(name)),
        asked=asked,
        weight_files=tuple(file.name for file in folder.weight_files),
        size=size,
        shape=shape,
        special_ids=special_ids(folder, asked.mask_token_id),
        chat_template=folder.chat_template_file,
        trained_block_size=_trained_block(folder),
        max_position=facts.max_position if facts else None,
        checkpoint_dtype=facts.torch_dtype if facts else None,
        vocab_size=vocab_size,
        tokenizer_size=folder.tokenizer.size or None if folder.tokenizer else None,
        fits=fits,
        command=ready_command(label, asked, has_chat_template=folder.chat_template_file is not None)
        if names
        else None,
        problems=tuple(dict.fromkeys(problems)),
        notes=(*asked.notes, *_notes(folder, asked, names)),
    )


def _family_problems(recognition: Recognition, asked: Asked, folder: Folder) -> list[str]:
    if recognition.doubt:
        return [recognition.doubt]
    if not recognition.names:
        said = f"config.json says {recognition.told_by}" if folder.config else "config.json cannot be read"
        return [f"no model name reads this checkpoint: {said}; the names are {', '.join(MODEL_DEFAULTS)}"]
    if asked.model_name not in recognition.names:
        return [
            f"model_name={asked.model_name!r} does not read this checkpoint ({recognition.told_by}); "
            f"use {' or '.join(recognition.names)}"
        ]
    return []


def _vocabulary_problems(folder: Folder, shape: ModelShape, asked: Asked) -> list[str]:
    facts = folder.facts
    if facts is None:
        return []
    problems = []
    rows = shape.embedding_rows
    if rows is not None and rows != facts.vocab_size:
        problems.append(f"the embedding has {rows} rows, config.json says {facts.vocab_size}")
    if facts.tokenizer_size > facts.vocab_size:
        problems.append(
            f"the tokenizer knows {facts.tokenizer_size} ids, the vocabulary has only {facts.vocab_size}; "
            "check that tokenizer and weights belong together"
        )
    written = asked.mask_token_id
    if written is not None and written >= facts.vocab_size:
        problems.append(f"mask_token_id ({written}) must be below the vocabulary's {facts.vocab_size} ids")
    elif written is None and facts.mask_token_id is None:
        problems.append(
            f"no file names a mask id (looked in {', '.join(facts.places_tried)}); write --mask-token-id"
        )
    return problems


def _rank_problems(shape: ModelShape, num_ranks: int) -> list[str]:
    counts = [(shape.num_heads or num_ranks, "attention heads")]
    counts += [(layer.num_kv_heads, "key/value heads") for layer in dict.fromkeys(shape.layers)]
    odd = [f"the {count} {what}" for count, what in counts if count % num_ranks]
    return [f"tensor_parallel_size={num_ranks} does not divide {' and '.join(odd)}"] if odd else []


def _trained_block(folder: Folder) -> int | None:
    trained = folder.facts.trained_block_size if folder.facts else None
    canvas = folder.config.get("canvas_length")
    return trained if trained is not None or not isinstance(canvas, int) else canvas


def _notes(folder: Folder, asked: Asked, names: Sequence[str]) -> Sequence[str]:
    notes = []
    facts = folder.facts
    if facts is not None and not facts.eos_token_ids:
        notes.append("no file names an end-of-sequence id; answers end only at their longest")
    if names and not runs_now(asked.model_name, asked.strategy):
        notes.append(
            f"this version does not run {asked.model_name} with {asked.strategy} yet; a later one does"
        )
    if folder.chat_template_file is None and folder.tokenizer is not None:
        notes.append("no chat template: apply_chat_template cannot be used, prompts are plain text")
    return notes
