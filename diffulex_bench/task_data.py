"""Where the documents of a task come from: generated problems, a local file, or the hub.

Task YAMLs name the ``load_*`` functions as ``custom_dataset``; lm-eval calls them with the YAML's
``metadata`` and ``dataset_kwargs`` and expects a mapping of split names to datasets.
"""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING, Any

from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from datasets import Dataset


def load_gsm_symbolic(
    num_problems: int = 400, seed: int | None = None, length_cut: bool = True, **_unused: Any
) -> dict[str, Dataset]:
    """Problems of the test split of the bundled generator, as split ``test``.

    The same arguments always give the same problems. ``seed`` None is the documented test seed;
    ``length_cut`` drops problems longer than the bundled models were trained for.
    """
    from datasets import Dataset

    from diffulex_bench.tiny import data

    problems = data.test_problems(num_problems, data.TEST_SEED if seed is None else seed, length_cut)
    rows = [
        {"question": one.question, "answer": one.answer, "solution": one.solution, "template": one.template}
        for one in problems
    ]
    return {"test": Dataset.from_list(rows)}


def local_source(path: Path, split: str) -> Callable[..., dict[str, Dataset]]:
    """A ``custom_dataset`` that reads one local file as the split ``split``, whatever the file is called."""

    def load_local_file(**_unused: Any) -> dict[str, Dataset]:
        from datasets import Dataset

        return {split: Dataset.from_list(read_rows(path))}

    return load_local_file


def hub_source(
    task: str, path: str, name: str | None, kwargs: Mapping[str, Any], splits: tuple[str, ...]
) -> Callable[..., Mapping[str, Dataset]]:
    """A ``custom_dataset`` that loads ``path`` through `datasets` and has all of ``splits``.

    Raises:
        BenchError: when called, and the data cannot be reached or lacks a split.
    """

    def load_from_hub(**_unused: Any) -> Mapping[str, Dataset]:
        import datasets

        try:
            found = datasets.load_dataset(path=path, name=name, **kwargs)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BenchError(
                f"task {task} needs the data set {path}, which could not be loaded ({reason}); give a local "
                "copy with --dataset-data-files FILE, or run once with network access"
            ) from error
        missing = [split for split in splits if split not in found]
        if missing:
            raise missing_split(task, missing[0], found)
        loaded: Mapping[str, Dataset] = found
        return loaded

    return load_from_hub


def missing_split(task: str, split: str, found: Iterable[object]) -> BenchError:
    """The error for a split that is not among those ``found``."""
    known = ", ".join(map(str, found))
    return BenchError(f"task {task} has no split {split!r}; set dataset_split to one of {known}")


def missing_field(task: str, source: str, columns: Sequence[str], error: Exception) -> BenchError | None:
    """The error for a task that reads a field its data lacks; None when ``error`` means something else.

    ``source`` is where the data come from, ``columns`` what they hold.
    """
    text = str(error.args[0]) if error.args else ""
    quoted = re.search(r"'([^']+)' is undefined|has no attribute '([^']+)'", text)
    name = next(filter(None, quoted.groups()), text) if quoted else text
    if not columns or name in columns:
        return None
    return BenchError(
        f"{source} has no field {name!r}, which task {task} reads; its fields are {', '.join(columns)}; "
        "rename them in the data or choose another task"
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines, JSON, CSV or Parquet file.

    Raises:
        BenchError: the file is unreadable, holds no records, or its ending is not known.
    """
    readers: dict[str, Callable[[Path], list[Any]]] = {
        ".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise BenchError(f"{path} has no known ending; data files end in {', '.join(readers)}")
    try:
        rows = reader(path)
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is not UTF-8 text ({error}); convert it") from error
    if not rows:
        raise BenchError(f"{path} holds no records; give a file with at least one")
    wrong = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise BenchError(f"record {wrong} of {path} is not a JSON object; every record must be one")
    return rows


def _read_json(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        if text.lstrip().startswith("["):
            listed: list[Any] = json.loads(text)
            return listed
    except json.JSONDecodeError as error:
        raise BenchError(f"{path} is no JSON list: {error}; restore the file") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}, line {number} is no JSON: {error}; restore the file") from error
    return rows


def _read_csv(path: Path) -> list[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _read_parquet(path: Path) -> list[Any]:
    from datasets import Dataset

    rows: list[Any] = Dataset.from_parquet(str(path)).to_list()
    return rows
