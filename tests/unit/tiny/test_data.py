from itertools import islice

import pytest

from diffulex_bench.tiny import data
from diffulex_bench.tiny.data import (
    problem_stream,
    split_of,
    template_ids,
    train_problems,
    validation_problems,
)
from diffulex_bench.tiny.feed import training_batches
from diffulex_bench.tiny.recipe import RECIPES
from diffulex_bench.tiny.tokenizer import EOS_ID, MASK_ID
from diffulex_bench.tiny.train import make_encoder

# The name without `test_`, so that pytest does not collect the function itself.
held_out = data.test_problems


def test_the_same_seed_gives_the_same_problems_and_another_seed_gives_others():
    assert held_out(30, length_cut=False) == held_out(30, length_cut=False)
    assert train_problems(30) == train_problems(30)
    assert held_out(30, seed=1, length_cut=False) != held_out(30, seed=2, length_cut=False)


def test_no_test_or_validation_question_is_ever_drawn_for_training():
    held = {problem.question for problem in (*held_out(400, length_cut=False), *validation_problems(400))}
    assert len(held) == 800
    assert {split_of(problem.question) for problem in train_problems(5000)} == {"train"}
    # Even with the test's own seed a training draw contains none of its questions.
    drawn = {problem.question for problem in train_problems(5000, seed=data.TEST_SEED)}
    assert not held & drawn


def test_no_test_question_occurs_in_the_tokens_of_training_rows():
    recipe = RECIPES["smoke"]
    encoder = make_encoder(recipe)
    held = {problem.question for problem in held_out(400, length_cut=False)}
    batches = islice(training_batches(recipe, encoder, seed=data.TEST_SEED), 30)
    questions = set()
    for batch in batches:
        is_clean = batch.group < 0
        for row in range(len(batch.ids)):
            for number in range(batch.problem[row].max() + 1):
                ids = batch.ids[row][is_clean[row] & (batch.problem[row] == number)]
                assert MASK_ID not in ids
                questions.add(encoder.decode(int(i) for i in ids if i != EOS_ID).split("\n")[0])
    assert len(questions) > 30
    assert not held & questions


def test_every_solution_ends_in_its_answer_as_a_number():
    for problem in train_problems(3000):
        last = problem.solution.split("\n")[-1]
        assert last.startswith("#### ")
        assert float(last.removeprefix("#### ").replace(",", "")) == float(problem.answer.replace(",", ""))
        assert problem.prompt == problem.question + "\n"


def test_test_problems_are_distinct_and_cover_nearly_all_templates():
    problems = held_out(1000, length_cut=False)
    assert len({problem.question for problem in problems}) == 1000
    assert len({problem.template for problem in problems}) >= 80
    assert len(template_ids()) == 85


def test_length_cut_keeps_only_problems_that_fit_and_drops_a_few_percent():
    cut = held_out(300)
    encoder = data._bundled_encoder()
    assert all(data.within_length_cut(problem, encoder) for problem in cut)
    uncut = held_out(300, length_cut=False)
    share = sum(not data.within_length_cut(problem, encoder) for problem in uncut) / 300
    assert 0.01 < share < 0.1


def test_template_weights_change_how_often_a_template_is_drawn():
    templates = template_ids()
    weights = [5.0 if template == templates[3] else 0.0 for template in templates]
    drawn = {problem.template for problem in islice(problem_stream("train", 1, weights), 50)}
    assert drawn == {templates[3]}


def test_wrong_number_of_template_weights_is_refused():
    with pytest.raises(ValueError, match=r"template_weights \(1 entries\)"):
        next(problem_stream("train", 1, [1.0]))
