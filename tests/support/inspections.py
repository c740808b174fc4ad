"""Inspections of made-up folders, on a machine whose memory does not depend on the test's."""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diffulex.utils.device import MemoryFacts
from diffulex_bench.inspection import report
from diffulex_bench.inspection.fit import Place
from diffulex_bench.inspection.show import print_inspection

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from diffulex_bench.inspection.report import Inspection

GIB = 2**30
ROOMY = Place("host", "cpu", MemoryFacts(total=64 * GIB, free=32 * GIB))


def set_places(monkeypatch: pytest.MonkeyPatch, *places: Place) -> None:
    """Let an inspection see these memories only."""
    monkeypatch.setattr(report, "places", lambda: list(places))


def inspect(folder: Path, **written: Any) -> Inspection:
    """The inspection of a folder under settings that were written as flags."""
    origins = {name: f"flag --{name.replace('_', '-')}" for name in written}
    return report.inspect_folder(str(folder), str(folder), written, origins)


def printed(found: Inspection, **options: Any) -> str:
    """What the command prints."""
    out = StringIO()
    print_inspection(found, Console(file=out, width=140, **options))
    return out.getvalue()


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def truncate(file: Path) -> None:
    """Cut the last byte off."""
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
