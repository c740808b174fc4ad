"""Tiny trained models in the box: their checkpoints and the program that trains them.

A YAML names one as ``model_path: bundled:tiny-sdar``; `bundled_model` turns the name into a folder.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from diffulex_bench.errors import BenchError

PREFIX: Final = "bundled:"
_FOLDERS: Final = {"tiny-sdar": "sdar"}


def bundled_model(name: str) -> Path:
    """Folder of the bundled checkpoint ``name``, written with or without the prefix ``bundled:``.

    Raises:
        BenchError: no model has this name.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in _FOLDERS:
        near = difflib.get_close_matches(bare, _FOLDERS, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        known = ", ".join(PREFIX + known for known in _FOLDERS)
        raise BenchError(f"there is no bundled model {bare!r}{hint} (there are: {known})")
    return Path(__file__).parent / "models" / _FOLDERS[bare]
