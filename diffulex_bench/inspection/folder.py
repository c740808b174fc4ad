"""Read what can be read of a checkpoint folder and note what cannot; no fault hides another."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.utils.checkpoint import CheckpointError, CheckpointFacts, read_facts
from diffulex.utils.special_ids import TokenizerFacts, read_tokenizer_files
from diffulex.utils.weight_files import (
    TensorHeader,
    find_weight_files,
    read_header,
    read_headers,
    read_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Folder", "read_folder"]

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint folder as far as its files can be read.

    `facts` is None when config.json or the tokenizer cannot be used; then `tokenizer` or `config` may still
    hold something. `headers` are those of the weight files that are whole, which are all of them when
    `has_all_weights`. Every fault stands in `problems` as a sentence.
    """

    path: Path
    config: Mapping[str, Any]
    facts: CheckpointFacts | None
    tokenizer: TokenizerFacts | None
    headers: Mapping[str, TensorHeader]
    weight_files: tuple[Path, ...]
    has_all_weights: bool
    chat_template_file: str | None
    problems: tuple[str, ...] = field(default=())


def read_folder(model_dir: str, tokenizer_dir: str | None = None) -> Folder:
    """The folder `model_dir`, its tokenizer read from `tokenizer_dir` when given.

    Raises:
        CheckpointError: there is no such folder.
    """
    path = Path(model_dir).expanduser()
    if not path.is_dir():
        read_facts(model_dir)  # raises: it knows hub ids and files from folders that do not exist
    problems: list[str] = []
    facts, config, tokenizer = None, {}, None
    tokenizer_path = path if tokenizer_dir is None else Path(tokenizer_dir).expanduser()
    try:
        facts = read_facts(path, tokenizer_dir)
        config = dict(facts.config)
        tokenizer = read_tokenizer_files(facts.tokenizer_path)
    except CheckpointError as error:
        problems.append(str(error))
        config = _config_or_nothing(path)
        tokenizer = _tokenizer_or_none(tokenizer_path, problems)
    num_problems = len(problems)
    headers, files = _read_weights(path, problems)
    return Folder(
        path=path,
        config=config,
        facts=facts,
        tokenizer=tokenizer,
        headers=headers,
        weight_files=files,
        has_all_weights=len(problems) == num_problems,
        chat_template_file=_chat_template_file(tokenizer_path, problems),
        problems=tuple(dict.fromkeys(problems)),
    )


def _config_or_nothing(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / "config.json") if (path / "config.json").is_file() else {}
    except CheckpointError:
        return {}  # already among the problems


def _tokenizer_or_none(path: Path, problems: list[str]) -> TokenizerFacts | None:
    try:
        return read_tokenizer_files(path)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _read_weights(path: Path, problems: list[str]) -> tuple[dict[str, TensorHeader], tuple[Path, ...]]:
    """Headers of the files that are whole, and those files; every missing or damaged file is a problem."""
    try:
        files, is_complete = find_weight_files(path), True
    except CheckpointError as error:
        problems.append(str(error))
        files, is_complete = tuple(sorted(path.glob("model*.safetensors"))), False
    found: dict[str, TensorHeader] = {}
    whole = []
    for file in files:
        try:
            found |= read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            whole.append(file)
    if is_complete and len(whole) == len(files):
        try:
            return read_headers(files), files  # compares the files with each other and with the index
        except CheckpointError as error:
            problems.append(str(error))
    return found, tuple(whole)


def _chat_template_file(path: Path, problems: list[str]) -> str | None:
    """The file that holds a chat template, None when there is none."""
    for name in _TEMPLATE_FILES:
        if (path / name).is_file():
            return name
    config = path / "tokenizer_config.json"
    try:
        return config.name if config.is_file() and read_json(config).get("chat_template") else None
    except CheckpointError as error:
        problems.append(str(error))
        return None
