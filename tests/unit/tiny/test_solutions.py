import pytest

from diffulex_bench.tiny.data import train_problems
from diffulex_bench.tiny.evaluate import result_of
from diffulex_bench.tiny.solutions import spell_out


@pytest.mark.parametrize(
    ("published", "spelled"),
    [
        ("9 * 92 = 828", "9 * 92 = 810 + 18 = 828"),
        ("69*12 = 828 plants", "69*12 = 720 + 108 = 828 plants"),
        ("$11 + $23 + $21 + $10 = $65.", "$11 + $23 + $21 + $10 = 34 + 21 + 10 = 55 + 10 = $65."),
        ("113 students - 2 read - 14 play = 97", "113 students - 2 read - 14 play = 111 - 14 = 97"),
        ("31/84*588 = 217", "31/84*588 = 31 * 7 = 210 + 7 = 217"),
        ("0.5 * 486 + 45 = 288", "0.5 * 486 + 45 = 243 + 45 = 288"),
        ("$1860 * 35% = $651", "$1860 * 35% = 558 + 93 = $651"),
    ],
)
def test_hard_arithmetic_is_written_in_small_steps(published: str, spelled: str):
    assert spell_out(published) == spelled


@pytest.mark.parametrize(
    "text",
    [
        "3 + 8 = 11 eggs",
        "10 * 47 = 470",
        "84 x 1 = 84",
        "7 * 8 = 56",
        "9 * 92 = 829",
        "x = 5",
        "2(87+78) = 330",
    ],
)
def test_easy_wrong_and_unknown_expressions_keep_their_text(text: str):
    assert spell_out(text) == text


def test_published_text_is_kept_apart_from_inserted_steps():
    for problem in train_problems(1500):
        spelled = spell_out(problem.solution)
        rest = iter(spelled)
        assert all(letter in rest for letter in problem.solution)
        assert spelled.split("\n")[-1] == problem.solution.split("\n")[-1]
        assert result_of(spelled) == float(problem.answer.replace(",", ""))
