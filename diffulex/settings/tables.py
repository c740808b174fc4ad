"""The reference tables of the settings, written into documents between markers.

A document names what it wants: ``<!-- settings: diffulex.settings.cache:CacheSettings -->`` the table of a
section, ``<!-- table: module:function -->`` what a function returns. The lines up to ``<!-- end -->`` are
replaced.

    python -m diffulex.settings.tables            brings docs/settings.md up to date
    python -m diffulex.settings.tables --check    fails when it is not
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diffulex.settings.spec import SettingInfo, bounds_text, settings_of
from diffulex.utils.registry import load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "markdown_table", "render", "section_table"]

DEFAULT_DOCUMENT: Final = Path("docs/settings.md")
_BLOCK: Final = re.compile(r"<!-- (settings|table): (\S+) -->\n(?:.*?)<!-- end -->", re.DOTALL)


def section_table(section: type) -> str:
    """One row for each setting of the section: name, default, values, help."""
    own = settings_of(section).values()
    rows = [(_name(info), _default(info), _values(info), info.setting.help) for info in own]
    return markdown_table(("Key", "Default", "Values", "What it does"), rows)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def render(text: str) -> str:
    """The document with every marked block as it should read.

    Raises:
        ValueError: a marker names nothing that exists or something of the wrong kind.
    """
    return _BLOCK.sub(lambda match: _block(match[1], match[2]), text)


def _block(kind: str, target: str) -> str:
    found = load_target(target)
    if kind == "settings":
        if not isinstance(found, type):
            raise ValueError(f"the marker 'settings: {target}' must name a section class, found {found!r}")
        table = section_table(found)
    else:
        if not callable(found):
            raise ValueError(f"the marker 'table: {target}' must name a function, found {found!r}")
        table = str(found())
    return f"<!-- {kind}: {target} -->\n\n{table}\n<!-- end -->"


def _name(info: SettingInfo) -> str:
    names = dict.fromkeys((info.name, info.file_name))
    return " / ".join(f"`{name}`" for name in names)


def _default(info: SettingInfo) -> str:
    if info.setting.required:
        return "required"
    if info.default is None:
        return "`null`"
    if info.default in ("", ()):
        return "empty"
    return f"`{info.default}`" if info.kind in (bool, int, float, str, tuple) else "see its settings"


def _values(info: SettingInfo) -> str:
    if info.setting.choices:
        return ", ".join(f"`{one}`" for one in info.setting.choices)
    words = {
        bool: "`True`, `False`",
        int: "whole number",
        float: "number",
        str: "text",
        tuple: "list",
        dict: "mapping",
    }
    parts = [words.get(info.kind, info.kind.__name__), bounds_text(info.setting)]
    if info.optional:
        parts.append("or `null`")
    return " ".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Brings the documents up to date, or with --check says which are not (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m diffulex.settings.tables", description=__doc__)
    parser.add_argument("documents", nargs="*", type=Path, default=[DEFAULT_DOCUMENT])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a document is stale")
    options = parser.parse_args(arguments)
    stale = []
    for path in options.documents:
        text = path.read_text(encoding="utf-8")
        if not _BLOCK.search(text):
            raise SystemExit(f"{path} holds no marked table")
        wanted = render(text)
        if wanted != text:
            stale.append(path)
            if not options.check:
                path.write_text(wanted, encoding="utf-8")
    for path in stale:
        state = (
            "is out of date; run python -m diffulex.settings.tables" if options.check else "is up to date now"
        )
        sys.stdout.write(f"{path} {state}\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
