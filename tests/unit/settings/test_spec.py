import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffulex.settings.spec import ConfigError, bounds_text, check_value, setting, settings_of


@dataclass(frozen=True)
class Sample:
    size: int = setting(4, help="h", choices=(4, 8))
    count: int = setting(1, help="h", low=1, high=9)
    share: float = setting(0.5, help="h", above=0, high=1)
    is_on: bool = setting(True, help="h")
    name: str = setting("x", help="h", choices=("alpha", "beta", "x"))
    limit: int | None = setting(None, help="h", low=1)
    ids: tuple[int, ...] = setting((), help="h", low=0)
    words: tuple[str, ...] = setting((), help="h")
    options: Mapping[str, object] | None = setting(None, help="h")


def check(name: str, value: object) -> tuple[object, str | None]:
    return check_value(settings_of(Sample)[name], value)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("size", 8, 8),
        ("size", np.int64(8), 8),
        ("count", 1, 1),
        ("count", 9, 9),
        ("share", 1, 1.0),
        ("share", np.float32(0.5), 0.5),
        ("is_on", False, False),
        ("name", "beta", "beta"),
        ("limit", None, None),
        ("limit", 3, 3),
        ("ids", [1, 2], (1, 2)),
        ("ids", 5, (5,)),
        ("words", "stop", ("stop",)),
        ("words", ["a", "b"], ("a", "b")),
        ("words", (), ()),
        ("options", {"a": 1}, {"a": 1}),
        ("options", None, None),
    ],
)
def test_a_usable_value_comes_back_in_plain_form(name: str, value: object, plain: object) -> None:
    result, wrong = check(name, value)
    assert wrong is None
    assert result == plain
    assert type(result) is type(plain)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("size", 5, "size must be one of 4, 8, got 5"),
        ("size", "8", "size must be a whole number, got '8'"),
        ("size", 8.0, "size must be a whole number, got 8.0"),
        ("size", True, "size must be a whole number, got True"),
        ("size", None, "size must be a whole number, got None"),
        ("count", 0, "count must be at least 1 and at most 9, got 0"),
        ("count", 10, "count must be at least 1 and at most 9, got 10"),
        ("share", 0, "share must be above 0 and at most 1, got 0.0"),
        ("share", 1.1, "share must be above 0 and at most 1, got 1.1"),
        ("share", float("nan"), "share must be a finite number, got nan"),
        ("share", float("inf"), "share must be a finite number, got inf"),
        ("share", True, "share must be a finite number, got True"),
        ("share", "0.5", "share must be a finite number, got '0.5'"),
        ("is_on", 1, "is_on must be true or false, got 1"),
        ("is_on", "true", "is_on must be true or false, got 'true'"),
        ("name", "betta", "name must be one of alpha, beta, x, got 'betta'; did you mean 'beta'?"),
        ("name", 3, "name must be a text, got 3"),
        ("limit", 0, "limit must be at least 1, got 0"),
        ("ids", [1, -1], "ids must be at least 0, got -1"),
        ("ids", [1, "2"], "ids must be a list of whole numbers, got [1, '2']"),
        ("ids", {1: 2}, "ids must be a list of whole numbers, got {1: 2}"),
        ("words", ["a", 1], "words must be a list of texts, got ['a', 1]"),
        ("words", 7, "words must be a list of texts, got 7"),
        ("options", [1], "options must be a mapping of names to values, got [1]"),
    ],
)
def test_a_wrong_value_is_answered_with_a_sentence(name: str, value: object, sentence: str) -> None:
    assert check(name, value)[1] == sentence


def test_a_path_is_text() -> None:
    @dataclass(frozen=True)
    class Files:
        folder: str = setting("", help="h")

    assert check_value(settings_of(Files)["folder"], Path("a/b")) == ("a/b", None)


def test_settings_come_in_order_of_definition_with_default_and_type() -> None:
    infos = settings_of(Sample)
    assert list(infos) == ["size", "count", "share", "is_on", "name", "limit", "ids", "words", "options"]
    assert (infos["limit"].kind, infos["limit"].optional, infos["limit"].default) == (int, True, None)
    assert (infos["ids"].kind, infos["ids"].item, infos["ids"].optional) == (tuple, int, False)
    assert (infos["options"].kind, infos["options"].optional) == (dict, True)


def test_one_name_in_two_sections_is_an_error() -> None:
    @dataclass(frozen=True)
    class Other:
        size: int = setting(1, help="another")

    with pytest.raises(ValueError, match="setting size stands in two sections"):
        settings_of(Sample, Other)


def test_fields_that_are_no_settings_are_left_out() -> None:
    @dataclass(frozen=True)
    class Mixed:
        size: int = setting(1, help="h")
        other: Any = None

    assert list(settings_of(Mixed)) == ["size"]


def test_an_error_lists_all_problems_and_survives_pickling() -> None:
    one = ConfigError(["a is wrong"])
    assert str(one) == "a is wrong"
    both = pickle.loads(pickle.dumps(ConfigError(["a is wrong", "b is wrong"])))
    assert both.problems == ("a is wrong", "b is wrong")
    assert str(both) == "2 settings cannot be used:\n  - a is wrong\n  - b is wrong"
    assert isinstance(both, ValueError)


def test_bounds_read_as_words() -> None:
    infos = settings_of(Sample)
    assert bounds_text(infos["count"].setting) == "at least 1 and at most 9"
    assert bounds_text(infos["share"].setting) == "above 0 and at most 1"
    assert bounds_text(infos["is_on"].setting) == ""
