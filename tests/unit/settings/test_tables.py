from dataclasses import dataclass
from pathlib import Path

import pytest

from diffulex.settings.reference import effect_table, feature_table, model_table, strategy_table
from diffulex.settings.spec import setting
from diffulex.settings.tables import main, markdown_table, render, section_table


@dataclass(frozen=True)
class Sample:
    folder: str = setting("", help="A folder.", file_name="folder_path", required=True)
    size: int = setting(4, help="A size | b.", choices=(4, 8))
    share: float | None = setting(None, help="A share.", above=0, high=1)
    ids: tuple[int, ...] = setting((), help="Ids.")


SECTION = f"{__name__}:Sample"
TABLE = """\
| Key | Default | Values | What it does |
| --- | --- | --- | --- |
| `folder` / `folder_path` | required | text | A folder. |
| `size` | `4` | `4`, `8` | A size \\| b. |
| `share` | `null` | number above 0 and at most 1 or `null` | A share. |
| `ids` | empty | list | Ids. |
"""


def some_table() -> str:
    return markdown_table(("A",), [("b",)])


def test_a_section_becomes_a_table() -> None:
    assert section_table(Sample) == TABLE


def test_marked_blocks_are_replaced_and_the_rest_stays() -> None:
    text = (
        f"before\n<!-- settings: {SECTION} -->\nold\n<!-- end -->\nbetween\n"
        f"<!-- table: {__name__}:some_table -->\n<!-- end -->\nafter\n"
    )
    wanted = (
        f"before\n<!-- settings: {SECTION} -->\n\n{TABLE}\n<!-- end -->\nbetween\n"
        f"<!-- table: {__name__}:some_table -->\n\n| A |\n| --- |\n| b |\n\n<!-- end -->\nafter\n"
    )
    assert render(text) == wanted
    assert render(wanted) == wanted


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("settings: pathlib:nothing", "module pathlib has no 'nothing'"),
        (f"settings: {__name__}:some_table", "must name a section class"),
        (f"table: {__name__}:TABLE", "must name a function"),
        ("table: nonsense", "a lazy target reads 'module:Name'"),
    ],
)
def test_a_wrong_marker_is_an_error(marker: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        render(f"<!-- {marker} -->\n<!-- end -->")


def test_check_fails_until_the_document_is_brought_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.md"
    path.write_text(f"<!-- settings: {SECTION} -->\n<!-- end -->\n")
    before = path.read_text()
    assert main(["--check", str(path)]) == 1
    assert path.read_text() == before
    assert "is out of date" in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert TABLE in path.read_text()
    assert main(["--check", str(path)]) == 0


def test_a_document_without_markers_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.md"
    path.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="holds no marked table"):
        main([str(path)])


def test_reference_tables_tell_what_runs() -> None:
    assert "| `sdar` | `multi_bd` | `naive` | `multi_bd` |" in model_table()
    assert "| `dream` | `d2f`, `multi_bd` | `naive` | `multi_bd` |" in model_table()
    assert (
        "| `d2f` | `multi_block_prefix_full=True`, `enable_prefix_caching=False` | not yet |"
        in strategy_table()
    )
    assert "| `attn_impl` | `naive` | a CUDA device | not yet |" in feature_table()
    assert "| `remask_threshold` | enable_remasking=True | refused |" in effect_table()
