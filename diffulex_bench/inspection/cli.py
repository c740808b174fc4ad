"""The command line of ``diffulex-bench inspect``; exit code 2 when the folder has a problem."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from diffulex.settings.flags import FlagParser, add_flags, flag_layer
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex_bench.tiny import PREFIX, bundled_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["inspect"]

_SECTION = "engine"


def inspect(words: Sequence[str], console: Console) -> bool:
    """Inspects the folder that `words` name, prints what was found, and returns whether it has no problem.

    Raises:
        CheckpointError: there is no such folder.
        ConfigError: a flag has a value that cannot be used.
    """
    from diffulex_bench.inspection.asked import ASKED

    parser = FlagParser(
        prog="diffulex-bench inspect",
        description="Tell what a checkpoint folder holds, what it needs and whether that fits.",
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help=f"Checkpoint folder, or {PREFIX}tiny-sdar.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_flags(parser, ENGINE_SECTIONS, _SECTION, only=ASKED)
    arguments = parser.parse_args(words)
    from diffulex_bench.inspection.report import inspect_folder
    from diffulex_bench.inspection.show import print_inspection

    layer = flag_layer(arguments)
    label: str = arguments.model_dir
    path = str(bundled_model(label)) if label.startswith(PREFIX) else label
    found = inspect_folder(label, path, layer.values.get(_SECTION, {}), layer.origins.get(_SECTION, {}))
    if arguments.json:
        console.print(json.dumps(found.as_dict(), indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        print_inspection(found, console)
    return not found.problems
