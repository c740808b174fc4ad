from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffulex_bench.answers import extract_flexible, extract_strict, parse_number
from diffulex_bench.scoring import FLEXIBLE, STRICT, gold_number, grade_number, grader_of, process_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18), ("18.0", 18), ("-3", -3), ("\u22123", -3), ("$1,234.00.", 1234), ("70,000.", 70000),
        ("50%", 50),
        ("1/2", Fraction(1, 2)), (".5", Fraction(1, 2)), ("+7", 7), ("-$5", -5), ("$-5", -5), ("€ 12", 12),
        ("1{,}234", 1234), ("12,345,678", 12345678),
        ("", None), ("two", None), ("1,2,3", None), ("18 apples", None), ("1.2.3", None), ("1/0", None),
        ("-", None),
    ],
)  # fmt: skip
def test_text_is_read_as_the_number_it_writes(text, value):
    assert parse_number(text) == value


@given(st.integers(-(10**12), 10**12))
def test_thousands_commas_currency_and_point_zero_do_not_change_a_value(number):
    assert parse_number(f"{number:,}") == number
    assert parse_number(f"{number}.00") == number
    assert parse_number(f"${number:,}.") == number


@pytest.mark.parametrize(
    ("text", "found", "method"),
    [
        ("so 3\n#### 18", "18", "hash_marker"),
        ("#### 18\nQ: next\n#### 5", "18", "hash_marker"),
        ("Thus \\boxed{42} of 50", "42", "boxed"),
        ("The answer is $1,234.00. That took 3 steps.", "$1,234.00", "answer_phrase"),
        ("Final answer: **7** after 9 tries", "7", "answer_phrase"),
        ("He pays $1,234.00.", "$1,234.00", "last_number"),
        ("16-3=13", "13", "last_number"),
        ("left with 16-3", "3", "last_number"),
        ("it fell to -3", "-3", "last_number"),
        ("items 1, 2, 3", "3", "last_number"),
        ("about 3/4 of it", "3/4", "last_number"),
    ],
)
def test_flexible_extraction_takes_the_number_a_reader_would(text, found, method):
    extraction = extract_flexible(text)
    assert extraction is not None
    assert (extraction.text, extraction.method) == (found, method)


def test_text_without_number_has_no_extraction():
    assert extract_flexible("no idea") is None
    assert extract_strict("the answer is 5") is None


def test_strict_wants_the_marker_and_flexible_does_not():
    grade = grade_number({"answer": "work\n#### 5"}, "The answer is 5.")
    assert grade.scores == {STRICT: 0.0, FLEXIBLE: 1.0}
    assert (grade.target, grade.extracted, grade.method) == ("5", "5", "answer_phrase")


def test_answer_without_number_scores_zero_and_says_so():
    grade = grade_number({"answer": "5"}, "")
    assert (grade.extracted, grade.method, grade.scores) == (None, "none", {STRICT: 0.0, FLEXIBLE: 0.0})


def test_target_that_is_no_number_is_compared_as_text():
    assert grade_number({"answer": "blue"}, " blue ").scores[STRICT] == 1.0
    assert grade_number({"answer": "blue"}, "red").scores[STRICT] == 0.0


def test_gold_is_what_follows_the_last_marker():
    assert gold_number("2+2=<<2+2=4>>4\n#### 4") == "4"
    assert gold_number("70000") == "70000"


def test_process_results_and_grader_agree():
    doc = {"answer": "#### 18"}
    assert process_number(doc, ["#### 18.0"]) == {STRICT: 1.0, FLEXIBLE: 1.0}
    assert grader_of(process_number) is grade_number
    assert grader_of(None) is None
