from pathlib import Path

import pytest
from transformers import AutoTokenizer

from diffulex_bench.tiny import bundled_model
from diffulex_bench.tiny.data import train_problems
from diffulex_bench.tiny.solutions import spell_out
from diffulex_bench.tiny.tokenizer import (
    EOS_ID,
    MASK_ID,
    PAD_ID,
    TextEncoder,
    save_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder.load(bundled_model("tiny-sdar"))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [problem.prompt + spell_out(problem.solution) for problem in train_problems(500, seed=77)]


def test_text_survives_encoding_and_decoding(encoder: TextEncoder, texts: list[str]):
    for text in (*texts, "", " ", "a  b\n\n", "Zażółć 12 ¾ 日本\t!", "3.5 = 7/2 - -1"):
        assert encoder.decode(encoder.encode(text)) == text


def test_fast_encoding_equals_the_tokenizer_file(encoder: TextEncoder, texts: list[str]):
    for text in texts:
        assert encoder.encode(text) == encoder.tokenizer.encode(text).ids


def test_every_digit_is_one_token_of_its_own(encoder: TextEncoder, texts: list[str]):
    digits = {encoder.encode(digit)[0] for digit in "0123456789"}
    assert len(digits) == 10
    for text in texts:
        num_digits = sum(letter in "0123456789" for letter in text)
        assert sum(token in digits for token in encoder.encode(text)) == num_digits


def test_saved_folder_loads_with_transformers_and_knows_its_special_tokens(tmp_path: Path, texts: list[str]):
    own = train_tokenizer(texts[:100], 400)
    save_tokenizer(own, tmp_path, max_length=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (EOS_ID, MASK_ID, PAD_ID)
    assert len(loaded) == own.vocab_size == 400
    for text in texts[:50]:
        assert loaded(text)["input_ids"] == own.encode(text)
        assert loaded.decode([*own.encode(text), EOS_ID], skip_special_tokens=True) == text


def test_training_twice_gives_the_same_tokenizer(texts: list[str]):
    first, second = train_tokenizer(texts, 500), train_tokenizer(texts, 500)
    assert all(first.encode(text) == second.encode(text) for text in texts)


def test_folder_without_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        TextEncoder.load(tmp_path)
