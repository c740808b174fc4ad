import pytest

from diffulex_bench.errors import BenchError
from diffulex_bench.prompts import PromptBuilder
from tests.support.bench import CharTokenizer

BOS = 1


def builder(add_bos_token=None, *, adds_bos=False, overlong="error", window=100):
    tokenizer = CharTokenizer()
    tokenizer.adds_bos = adds_bos
    return PromptBuilder(tokenizer, add_bos_token=add_bos_token, overlong=overlong, window=window)


@pytest.mark.parametrize("text", ["ab", "<s>ab"])
@pytest.mark.parametrize(
    ("add_bos_token", "adds_bos", "num_bos_of_plain"),
    [(None, False, 0), (None, True, 1), (True, False, 1), (True, True, 1), (False, True, 0)],
)
def test_bos_follows_the_setting_and_is_never_doubled(text, add_bos_token, adds_bos, num_bos_of_plain):
    ids = builder(add_bos_token, adds_bos=adds_bos).build(text, 10).token_ids
    assert ids.count(BOS) == (1 if text.startswith("<s>") else num_bos_of_plain)
    assert ids[-2:] == [ord("a") + 10, ord("b") + 10]


def test_wanted_bos_that_does_not_exist_is_an_error():
    tokenizer = CharTokenizer()
    tokenizer.bos_token = None
    with pytest.raises(BenchError, match="no BOS token"):
        PromptBuilder(tokenizer, add_bos_token=True, overlong="error", window=10)


def test_prompt_that_leaves_one_token_of_room_is_fine_and_one_more_is_not():
    assert builder(window=5).build("abcd", 10).error is None
    refused = builder(window=5).build("abcde", 10)
    assert refused.too_long
    assert "5 tokens" in refused.error
    assert "(5)" in refused.error


def test_left_policy_keeps_the_end_and_leaves_room_for_the_answer():
    prompt = builder(overlong="left", window=10).build("0123456789ab", 3)
    assert (prompt.text, prompt.num_cut, prompt.too_long, prompt.error) == ("56789ab", 5, True, None)
    assert len(prompt.token_ids) == 10 - 3


def test_left_policy_never_keeps_less_than_half_the_window():
    assert len(builder(overlong="left", window=10).build("0123456789ab", 500).token_ids) == 5


def test_left_policy_keeps_the_bos_in_front():
    prompt = builder(True, overlong="left", window=10).build("0123456789ab", 3)
    assert prompt.token_ids[0] == BOS
    assert len(prompt.token_ids) == 7
    assert prompt.text == "<s>6789ab"


def test_stop_string_that_is_one_special_token_also_becomes_a_stop_id():
    assert builder().split_stops(["Q:", "<|end|>"]) == (("Q:", "<|end|>"), (2,))
