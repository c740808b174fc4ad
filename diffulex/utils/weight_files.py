"""Safetensors files of a checkpoint folder: which there are, what they hold, their tensors one by one.

Headers are read with the standard library, so that names, shapes and sizes are known (and truncated files
are found) before a single weight is loaded.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Types of tensors, as file headers call them, that weights are read from.
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
_LENGTH_BYTES = 8
# A header beyond this size is no header: the safetensors format itself stops there (bytes).
_MAX_HEADER_BYTES = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used as it is."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor; `num_bytes` is its size in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; anything else is a `CheckpointError` that names the file and the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; restore the file") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}; restore the file") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, it holds a {type(value).__name__}; restore the file"
        )
    return value


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of `folder`, in the order of their names; every missing shard is named."""
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        files = sorted({folder / name for name in read_weight_map(folder).values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(files)} shards that {INDEX_FILE} lists: "
                f"{', '.join(missing)}; fetch them again"
            )
        return tuple(files)
    shards = tuple(sorted(folder.glob("model-*.safetensors")))
    if shards:
        return shards
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds only pickled weights (*.bin), which are not read; convert them to {SINGLE_FILE}"
        )
    raise CheckpointError(
        f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there; complete the folder"
    )


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a sharded checkpoint says."""
    path = folder / INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; restore the file")
    names = {str(name): str(file) for name, file in weight_map.items()}
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise CheckpointError(
            f"{path} names files outside its folder: {', '.join(outside)}; use plain file names"
        )
    return names


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Every tensor of `files` by name; a truncated, foreign or repeated piece is a `CheckpointError`.

    A tensor that the index of a sharded checkpoint promises and no shard holds is an error as well.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in read_header(file).items():
            if name in headers:
                raise CheckpointError(
                    f"{name} is in both {headers[name].file.name} and {file.name} of {file.parent}; keep one"
                )
            headers[name] = header
    if files and files[0].name != SINGLE_FILE and (files[0].parent / INDEX_FILE).is_file():
        promised = read_weight_map(files[0].parent)
        lost = [f"{name} ({file})" for name, file in promised.items() if name not in headers]
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors that {INDEX_FILE} lists are in no shard of {files[0].parent}: "
                f"{', '.join(lost)}; fetch the shards again"
            )
    return headers


def iter_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, file by file, memory-mapped: a tensor's bytes are read when it is copied."""
    from safetensors import safe_open

    for file in files:
        names = read_header(file)  # a truncated file is named before its tensors are touched
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Every tensor of one file by name; a truncated or foreign file is a `CheckpointError`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else -1
        if length < 0 or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise _broken(file, f"its {size} bytes do not hold a whole header")
        try:
            entries = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _broken(file, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _broken(file, "its header is no table of tensors")
    headers = {
        name: _tensor_header(file, name, entry) for name, entry in entries.items() if name != "__metadata__"
    }
    expected = _LENGTH_BYTES + length + sum(header.num_bytes for header in headers.values())
    if size != expected:
        raise _broken(file, f"it has {size} bytes where its header promises {expected}")
    return headers


def _tensor_header(file: Path, name: str, entry: Mapping[str, Any]) -> TensorHeader:
    try:
        begin, end = entry["data_offsets"]
        header = TensorHeader(
            file, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(end) - int(begin)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(file, f"its header does not describe {name}") from error
    if header.num_bytes < 0 or (header.num_bytes == 0) != (math.prod(header.shape) == 0):
        raise _broken(
            file, f"its header gives {header.num_bytes} bytes to {name} of shape {list(header.shape)}"
        )
    return header


def _broken(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or damaged: {why}; fetch the file again")
