import pytest

from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.generation import cut_at_stops, plan_generation, split_thinking, stop_strings

NOTHING: frozenset[str] = frozenset()


def test_written_eval_value_wins_over_task_and_task_over_default():
    settings = EvalSettings(max_tokens=100, temperature=0.0)
    task = {"max_gen_toks": 512, "temperature": 0.7, "do_sample": True, "max_nfe": 9}
    plan = plan_generation(settings, frozenset({"max_tokens"}), task)
    assert plan.values["max_tokens"] == 100
    assert plan.values["temperature"] == 0.7
    assert plan.values["max_nfe"] == 9
    assert plan.values["top_k"] == 0
    assert [plan.origins[name] for name in ("max_tokens", "temperature", "top_k")] == [
        "eval",
        "task",
        "default",
    ]


def test_written_value_that_equals_the_default_still_wins():
    plan = plan_generation(EvalSettings(max_tokens=256), frozenset({"max_tokens"}), {"max_gen_toks": 2048})
    assert plan.values["max_tokens"] == 256


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"max_gen_toks": 1, "max_new_tokens": 2, "max_tokens": 3}, 1),
        ({"max_new_tokens": 2, "max_tokens": 3}, 2),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 3),
        ({"max_completion_tokens": "4"}, 4),
        ({"max_gen_toks": None}, 256),
    ],
)
def test_answer_length_is_found_under_all_its_names_in_lm_evals_order(kwargs, expected):
    assert plan_generation(EvalSettings(), NOTHING, kwargs).values["max_tokens"] == expected


def test_task_that_does_not_sample_is_greedy_whatever_its_temperature():
    assert (
        plan_generation(EvalSettings(), NOTHING, {"do_sample": False, "temperature": 0.8}).values[
            "temperature"
        ]
        == 0
    )
    assert plan_generation(EvalSettings(), NOTHING, {"temperature": 0.8}).values["temperature"] == 0.8


def test_task_arguments_are_not_changed():
    kwargs = {"until": ["x"], "max_gen_toks": 5}
    plan_generation(EvalSettings(), NOTHING, kwargs)
    assert kwargs == {"until": ["x"], "max_gen_toks": 5}


def test_unknown_task_arguments_are_listed():
    assert plan_generation(EvalSettings(), NOTHING, {"num_beams": 4, "do_sample": False}).ignored == (
        "num_beams",
    )


@pytest.mark.parametrize(
    "kwargs",
    [{"max_gen_toks": "many"}, {"max_gen_toks": 0}, {"max_gen_toks": 0.5}, {"top_p": 3}, {"until": [1]}],
)
def test_unusable_task_argument_is_an_error_that_names_the_task(kwargs):
    with pytest.raises(BenchError, match="task toy"):
        plan_generation(EvalSettings(), NOTHING, kwargs, "task toy")


@pytest.mark.parametrize(
    ("until", "stops"),
    [("Q:", ("Q:",)), (["a", "b", "a"], ("a", "b")), (None, ()), ([], ()), ([""], ()), (("x",), ("x",))],
)
def test_until_may_be_a_string_a_list_or_nothing(until, stops):
    assert stop_strings(until) == stops


def test_text_is_cut_at_the_earliest_stop_whatever_their_order():
    assert cut_at_stops("one STOP two END three", ["END", "STOP"]) == "one "
    assert cut_at_stops("nothing here", ["END"]) == "nothing here"
    assert cut_at_stops("any", []) == "any"


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>a</think>answer", False, ("a", "answer")),
        ("\n<think>a</think>\n\nanswer", False, ("a", "answer")),
        ("thoughts</think> answer", True, ("thoughts", "answer")),
        ("<think>never closed", False, ("never closed", "")),
        ("an answer about </think> tags", False, (None, "an answer about </think> tags")),
        ("plain", False, (None, "plain")),
    ],
)
def test_leading_thinking_part_is_split_off(text, opened, expected):
    assert split_thinking(text, opened=opened) == expected


def test_sampling_params_carry_values_seed_and_stops():
    plan = plan_generation(
        EvalSettings(max_nfe=3), frozenset({"max_nfe"}), {"until": "Q:", "max_gen_toks": 7}
    )
    params = plan.sampling_params(seed=5, stops=plan.stops, stop_token_ids=(2,))
    assert (params.max_tokens, params.max_nfe, params.seed) == (7, 3, 5)
    assert (params.stop, params.stop_token_ids, params.stop_after) == (("Q:",), (2,), "</think>")
    assert plan.sampling_params(seed=5, stops=()).stop_after is None
