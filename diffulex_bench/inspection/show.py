"""Print an inspection: tables on a terminal, aligned lines of plain text otherwise."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from diffulex_bench.inspection.fit import ITEM_SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from diffulex_bench.inspection.asked import Option
    from diffulex_bench.inspection.fit import Fit
    from diffulex_bench.inspection.report import Inspection

__all__ = ["print_inspection"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GAP = 2


def print_inspection(found: Inspection, console: Console) -> None:
    """What was found, whether it fits, then the problems, or without any the command to run it."""
    rows = list(_rows(found))
    if console.is_terminal:
        table = Table(title=found.model, title_justify="left", title_style="bold", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        console.print(table)
    else:
        console.print(Text(found.model), soft_wrap=True)
        width = max(len(name) for name, _ in rows) + _GAP
        for name, value in rows:
            for number, line in enumerate(value.splitlines()):
                console.print(Text(("" if number else name).ljust(width) + line), soft_wrap=True)
    if found.command is not None and not found.problems:
        console.print(Text(f"run it: {found.command}"), soft_wrap=True)
    for text in found.notes:
        console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)
    for text in found.problems:
        console.print(Text(f"problem: {text}", style="red"), soft_wrap=True)


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Names and values; a value may have several lines."""
    yield "model names", _names_text(found)
    yield "strategies", _strategies_text(found)
    yield "weights", _weights_text(found)
    yield "shape", _shape_text(found)
    yield "output matrix", found.shape.head
    if found.shape.layers:
        yield "KV cache", _cache_text(found)
    yield "vocabulary", _vocabulary_text(found)
    if found.special_ids:
        yield "special ids", _ids_text(found)
    yield "chat template", found.chat_template or "none"
    yield "trained block", _or_unknown(found.trained_block_size)
    yield "longest input", _or_unknown(found.max_position)
    for fit in found.fits:
        yield f"fits {fit.place}", _fit_text(found, fit)


def _names_text(found: Inspection) -> str:
    recognition = found.recognition
    if not recognition.names:
        return f"none ({recognition.told_by or 'nothing to tell it by'})"
    listed = " or ".join(recognition.names)
    why = recognition.told_by
    if recognition.chosen_by:
        why += f"; {recognition.names[0]} first by {recognition.chosen_by}"
    elif len(recognition.names) > 1:
        why += "; the files are the same for all of them"
    return f"{listed} ({why})"


def _strategies_text(found: Inspection) -> str:
    """One line for all names that have the same strategies."""
    lines = []
    by_name = [(name, list(group)) for name, group in groupby(found.options, key=lambda one: one.model_name)]
    for texts, group in groupby(
        by_name,
        key=lambda pair: ", ".join(_option_text(one) for one in pair[1]),
    ):
        names = [name for name, _ in group]
        lines.append(texts if len(by_name) == 1 else f"{', '.join(names)}: {texts}")
    return "\n".join(lines) or "none"


def _option_text(option: Option) -> str:
    remarks = ["default"] if option.is_default else []
    remarks += [] if option.runs_now else ["not available yet"]
    return option.strategy + (f" ({', '.join(remarks)})" if remarks else "")


def _weights_text(found: Inspection) -> str:
    size = found.size
    if not size.total:
        return "none that can be read"
    parts = [f"{size.total:,} parameters in {_counted(len(found.weight_files), 'file')}"]
    stored = ", ".join(f"{dtype} {as_size(num_bytes)}" for dtype, (_, num_bytes) in size.by_dtype.items())
    parts[0] += f" ({stored})"
    if size.skipped:
        parts.append(f"{size.skipped:,} of them are not text and are left out")
    if size.active != size.used:
        parts.append(f"{size.active:,} work on one token")
    parts.append(", ".join(f"{as_size(size.used * width)} as {name}" for name, width in ITEM_SIZES.items()))
    return "\n".join(parts)


def _shape_text(found: Inspection) -> str:
    shape = found.shape
    parts = [f"{_or_unknown(shape.num_layers)} layers of width {_or_unknown(shape.hidden_size)}"]
    if shape.num_heads:
        parts.append(f"{shape.num_heads} heads")
    kinds = {layer: shape.layers.count(layer) for layer in shape.layers}
    for layer, count in kinds.items():
        where = f" in {_counted(count, 'layer')}" if len(kinds) > 1 else ""
        parts.append(f"{_counted(layer.num_kv_heads, 'KV head')} of width {layer.head_dim}{where}")
    if shape.experts:
        parts.append(f"{shape.experts[0]} experts, {shape.experts[1]} for a token")
    return ", ".join(parts)


def _cache_text(found: Inspection) -> str:
    page = found.asked.page_size
    return "\n".join(
        f"{as_size(found.kv_bytes_per_token(name))} a token, "
        f"{as_size(found.kv_bytes_per_token(name) * page)} a page of {page} ({', '.join(names)})"
        for name, names in (("float32", ["float32"]), ("bfloat16", ["bfloat16", "float16"]))
    )


def _vocabulary_text(found: Inspection) -> str:
    rows, ids = found.vocab_size, found.tokenizer_size
    if rows is None:
        return "unknown"
    if ids is None:
        return f"{rows:,} rows; the tokenizer's size cannot be read"
    unused = f"; the last {rows - ids:,} rows are never sampled" if rows > ids else ""
    return f"{rows:,} rows, {ids:,} ids in the tokenizer{unused}"


def _ids_text(found: Inspection) -> str:
    """One line an id; but for the mask the key is the same in all files, so the files are enough."""
    lines = []
    for one in found.special_ids:
        files = [source if one.role == "mask" else source.partition(":")[0] for source in one.sources]
        lines.append(f"{one.role} {one.token_id}{f' {one.text}' if one.text else ''} ({', '.join(files)})")
    return "\n".join(lines)


def _fit_text(found: Inspection, fit: Fit) -> str:
    asked = found.asked
    requests = f"{_counted(asked.max_num_reqs, 'request')} of {asked.max_model_len:,} tokens"
    ranks = asked.tensor_parallel_size
    head = f"weights {as_size(fit.weight_bytes)}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    need = f"{head}, KV {as_size(fit.wanted_cache_bytes)} for {requests} ({fit.wanted_pages:,} pages)"
    if fit.logits_rows:
        need += f", logits {as_size(fit.logits_bytes)} for {fit.logits_rows:,} rows at a time"
    verdict = {
        "fits": f"yes, as {fit.dtype}",
        "fits fewer requests": f"partly, as {fit.dtype}: {fit.num_pages:,} pages hold "
        f"{_counted(fit.requests_at_once, 'request')} of full length at once, the others wait or are shorter",
        "does not fit": f"no, as {fit.dtype}: {fit.reason}",
    }[fit.verdict]
    return f"{verdict}\n{need}\n{as_size(fit.free_bytes)} of {as_size(fit.total_bytes)} are free"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def as_size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one: "16.0 KiB"."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.1f} {_UNITS[power]}"
