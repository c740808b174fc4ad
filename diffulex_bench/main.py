"""The command ``diffulex-bench``: read settings, run, report, exit code.

Exit codes: 0 done; 2 a fault of the user, told in one message before weights load; 130 after Ctrl-C, with
everything finished kept, 143 after SIGTERM likewise; 1 any other failure, its traceback in ``run.log``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from diffulex.logger import get_logger
from diffulex.settings.flags import FlagParser, add_flags, flag_layer
from diffulex.settings.spec import ConfigError
from diffulex.utils.checkpoint import CheckpointError
from diffulex.utils.tokenizer import TokenizerError
from diffulex_bench.config import BENCH_SECTIONS, LIMIT_HINT, BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.run_logs import RunLogs
from diffulex_bench.surroundings import leave_launcher, prepare_hub, quiet_libraries
from diffulex_bench.task_files import find_config, include_folders, needs_hub

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = get_logger(__name__)

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
USER_ERRORS = (ConfigError, CheckpointError, TokenizerError, BenchError)
EXAMPLE_CONFIG = "tiny_multi_bd"
#: Set to anything, it brings the traceback of an unforeseen failure to the terminal.
DEBUG_VARIABLE = "DIFFULEX_DEBUG"
_PIPE_WIDTH = 140
_ABOUT = "Run a benchmark of diffusion language models."
_COMMANDS_HELP = """\
commands (each has its own --help):
  run                    run a benchmark; may be left out
  config [--explain]     show the resolved settings of a run, and where each came from
  inspect MODEL_DIR      tell what a checkpoint holds and whether it fits this machine"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (without the program's name) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(words[0]) if words else None
    with RunLogs() as logs:
        return _guarded(command or run_command, words[1:] if command else words, logs)


def _guarded(command: Callable[[Sequence[str], RunLogs], int], words: Sequence[str], logs: RunLogs) -> int:
    try:
        return command(words, logs)
    except USER_ERRORS as error:
        logs.console.print(
            f"diffulex-bench: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        logger.debug("%s", traceback.format_exc())
        return USER_ERROR
    except KeyboardInterrupt:
        logger.warning("interrupted before anything was generated")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the last resort of a program: one line here, the rest in run.log
        logger.error("%s: %s", type(error).__name__, error)
        if os.environ.get(DEBUG_VARIABLE):
            logger.error("%s", traceback.format_exc())
        elif logs.path is None:
            logger.error("set %s=1 and run again to see the traceback", DEBUG_VARIABLE)
        else:
            logger.debug("%s", traceback.format_exc())
            logger.error("the traceback is in %s", logs.path)
        return FAILED


def run_command(words: Sequence[str], logs: RunLogs) -> int:
    """``diffulex-bench [flags]``: runs a benchmark."""
    arguments = _parser("diffulex-bench", f"{_ABOUT}\n\n{_COMMANDS_HELP}").parse_args(words)
    quiet_libraries()
    leave_launcher()
    bench = _load(arguments)
    _require_lm_eval()
    folders = include_folders(bench.eval.include_path, bench.search_folders("include_path"))
    prepare_hub(needed=needs_hub(bench.eval, folders))
    from diffulex_bench.runner import run_benchmark

    outcome = run_benchmark(bench, logs, console=_output_console(), command=["diffulex-bench", *words])
    return outcome.exit_code


def config_command(words: Sequence[str], logs: RunLogs) -> int:  # noqa: ARG001  # all commands are called alike
    """``diffulex-bench config --explain``: prints resolved settings and runs nothing."""
    parser = _parser("diffulex-bench config", "Show the resolved settings of a run without running it.")
    parser.add_argument("--explain", action="store_true", help="Also say where each value comes from.")
    arguments = parser.parse_args(words)
    from diffulex_bench.explain import print_settings

    print_settings(_load(arguments), origins=arguments.explain, console=_output_console())
    return OK


def inspect_command(words: Sequence[str], logs: RunLogs) -> int:  # noqa: ARG001  # all commands are called alike
    """``diffulex-bench inspect MODEL_DIR``: tells what a checkpoint folder holds and needs; loads nothing."""
    from diffulex_bench.inspection.cli import inspect

    return OK if inspect(words, _output_console()) else USER_ERROR


COMMANDS: dict[str, Callable[[Sequence[str], RunLogs], int]] = {
    "run": run_command,
    "config": config_command,
    "inspect": inspect_command,
}


class _BenchParser(FlagParser):
    """The flags of the bench; an error about ``--dataset-limit`` says which values it takes."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2 after one message."""
        super().error(message + LIMIT_HINT if "--dataset-limit" in message else message)


def _parser(prog: str, description: str) -> FlagParser:
    parser = _BenchParser(prog=prog, description=description)
    # The lines of the description stay as they are.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with engine and eval sections, or the name of a bundled one; may be repeated, the "
        f"last wins. Without it and without --model-path the bundled {EXAMPLE_CONFIG} is used.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.NAME=VALUE",
        help="Override one value, as in engine.block_size=16; may be repeated.",
    )
    for section, types in BENCH_SECTIONS.items():
        add_flags(parser, types, section)
    return parser


def _load(arguments: argparse.Namespace) -> BenchConfig:
    flags = flag_layer(arguments)
    names = list(arguments.config)
    has_model = "model" in flags.values.get("engine", {}) or any(
        text.startswith(("engine.model=", "engine.model_path=")) for text in arguments.overrides
    )
    if not names and not has_model:
        logger.info("no --config and no --model-path given: taking the bundled %s", EXAMPLE_CONFIG)
        names = [EXAMPLE_CONFIG]
    return BenchConfig.load([find_config(name) for name in names], arguments.overrides, flags)


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise BenchError(
            "the benchmark needs the package lm-eval; install it with: pip install 'diffulex[bench]'"
        )


def _output_console() -> Console:
    """Standard output; wide enough for the tables when it is a pipe or a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
