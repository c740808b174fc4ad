"""Print resolved settings, with where each value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from diffulex_bench.config import BenchConfig


def print_settings(bench: BenchConfig, *, origins: bool, console: Console) -> None:
    """One table a section on a terminal, otherwise one line a setting: ``section.name = value  # origin``."""
    for section, rows in bench.explain().items():
        if console.is_terminal:
            console.print(_table(section, rows, origins=origins))
            continue
        for name, value, origin in rows:
            line = f"{section}.{name} = {_text(value)}" + (f"  # {origin}" if origins else "")
            console.print(Text(line), soft_wrap=True)


def _table(section: str, rows: list[tuple[str, object, str]], *, origins: bool) -> Table:
    table = Table(title=section, title_justify="left", title_style="bold")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    if origins:
        table.add_column("from", overflow="fold")
    for name, value, origin in rows:
        is_own = origin.startswith(("yaml", "flag", "--set"))
        cells = [name, _text(value), origin] if origins else [name, _text(value)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if is_own else "")
    return table


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
