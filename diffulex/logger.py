"""Loggers of the project: `get_logger` for modules, `setup_logger` for programs, `LoggerMixin` for classes.

Importing the project configures nothing. A program calls `setup_logger` once; worker processes pass their
rank, and then only warnings and errors of ranks above 0 are shown.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

__all__ = ["LoggerMixin", "RankFilter", "get_logger", "setup_logger"]

ROOT_NAMES: Final = ("diffulex", "diffulex_bench")
_LINE_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT: Final = "%H:%M:%S"
_OWNED: Final = "_diffulex_handler"


class RankFilter(logging.Filter):
    """Lets every record of rank 0 pass, and of other ranks only warnings and errors, marked with the rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """True when the record is to be shown."""
        if self.rank == 0:
            return True
        if record.levelno < logging.WARNING:
            return False
        marked = f"[rank {self.rank}] "
        if not str(record.msg).startswith(marked):
            record.msg = marked + str(record.msg)
        return True


def get_logger(name: str = "diffulex") -> logging.Logger:
    """The logger called `name`, inside the project's tree ("my_tool" becomes "diffulex.my_tool")."""
    if name.split(".", 1)[0] not in ROOT_NAMES:
        name = f"diffulex.{name}"
    return logging.getLogger(name)


def setup_logger(
    level: int | str = "INFO",
    *,
    log_file: str | Path | None = None,
    rank: int = 0,
) -> logging.Logger:
    """Records of the project at `level` and above go to the error stream, and to `log_file` when given.

    Calling it again replaces what an earlier call set up, so no line is ever written twice. Loggers of other
    libraries and the root logger stay as they are.

    Args:
        level: A `logging` level or its name.
        log_file: A file that is appended to; its folder is made when missing.
        rank: Number of this process; ranks above 0 show warnings and errors only.

    Returns:
        The logger "diffulex".

    Raises:
        ValueError: `level` is no level.
    """
    number = _level_number(level)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_file is not None:
        path = Path(log_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_LINE_FORMAT, _TIME_FORMAT))
        handler.addFilter(RankFilter(rank))
        handler.set_name(_OWNED)
    for root in ROOT_NAMES:
        logger = logging.getLogger(root)
        for old in [one for one in logger.handlers if one.get_name() == _OWNED]:
            logger.removeHandler(old)
            old.close()
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(number)
        logger.propagate = False
    return logging.getLogger("diffulex")


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ValueError(f"level must be one of {', '.join(known)}, got {level!r}")
    return known[level.upper()]


class LoggerMixin:
    """Gives a class `self.logger`, named after its module and class."""

    @property
    def logger(self) -> logging.Logger:
        """The logger "<module>.<class>"."""
        return get_logger(f"{type(self).__module__}.{type(self).__qualname__}")
