from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from diffulex.utils.checkpoint import read_checkpoint
from diffulex.utils.tokenizer import IncrementalDecoder, Tokenizer, TokenizerError, load_tokenizer
from tests.support.checkpoints import write_stub

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if quiet is defined %}!{% endif %}"
)
BOS, EOS, MASK = 256, 257, 258


def byte_level(folder: Path, *, adds_bos: bool = True, **config: Any) -> Path:
    """A checkpoint folder whose tokenizer has one token a byte, and BOS, EOS and a mask behind them."""
    write_stub(folder, 259, mask_id=MASK, eos_ids=(EOS,))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<mask>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "mask_token": "<mask>",
        "model_max_length": 64,
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path, **options: Any) -> Tokenizer:
    return load_tokenizer(read_checkpoint(folder), **options)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(tmp_path_factory.mktemp("bytes")))


class TestLoading:
    def test_special_tokens_and_size(self, tokenizer: Tokenizer) -> None:
        assert (tokenizer.size, tokenizer.eos_token_id, tokenizer.bos_token_id) == (259, EOS, BOS)
        assert tokenizer.bos_token == "<s>"

    def test_a_folder_of_its_own_can_be_given(self, tmp_path: Path) -> None:
        model = write_stub(tmp_path / "model", 30, mask_id=1, eos_ids=(2,))
        other = byte_level(tmp_path / "other")
        assert load(model).size == 30
        assert load(model, tokenizer_path=other).size == 259
        assert load_tokenizer(read_checkpoint(model, other)).size == 259

    def test_tokenizer_json_alone_is_enough(self, tmp_path: Path) -> None:
        folder = byte_level(tmp_path / "model", adds_bos=False)
        (folder / "tokenizer_config.json").unlink()
        loaded = load(folder)
        assert loaded.decode(loaded.encode("as it is")) == "as it is"
        assert loaded.bos_token is None
        assert loaded.chat_template is None

    def test_a_class_that_needs_remote_code_is_replaced_by_tokenizer_json(self, tmp_path: Path) -> None:
        auto_map = {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}
        folder = byte_level(tmp_path / "model", tokenizer_class="OddTokenizer", auto_map=auto_map)
        loaded = load(folder)
        assert (
            loaded.encode("a", add_special_tokens=False) == load(byte_level(tmp_path / "b")).encode("a")[1:]
        )

    def test_without_tokenizer_json_the_error_names_the_option(self, tmp_path: Path) -> None:
        auto_map = {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}
        folder = byte_level(tmp_path / "model", tokenizer_class="OddTokenizer", auto_map=auto_map)
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps({"a": 0}))
        with pytest.raises(TokenizerError, match="trust_remote_code"):
            load(folder)

    def test_dreams_own_class_is_read_as_the_one_it_copies(self, tmp_path: Path) -> None:
        folder = byte_level(tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        merged = ["th", "the", "12", "'s"]
        (folder / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols + merged)}))
        (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n1 2\n' s\n")
        roles = ("<|endoftext|>", "<|beginoftext|>", "<|mask|>")
        added = {str(260 + i): {"content": role, "special": True} for i, role in enumerate(roles)}
        settings = {
            "tokenizer_class": "DreamTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
            "added_tokens_decoder": added,
            "eos_token": roles[0],
            "bos_token": roles[1],
            "mask_token": roles[2],
            "chat_template": TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        loaded = load(folder)
        assert (loaded.eos_token_id, loaded.bos_token_id, loaded.size) == (260, 261, 263)
        # Digits stay apart, as Qwen2 splits them, although there is a merge.
        ids = loaded.encode("the 12's<|mask|>")
        assert [loaded.decode([one], skip_special_tokens=False) for one in ids] == [
            "the", " ", "1", "2", "'s", "<|mask|>",
        ]  # fmt: skip
        assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]).startswith("<|beginoftext|>")


class TestEncoding:
    def test_bos_is_put_in_front_once(self, tokenizer: Tokenizer) -> None:
        plain = tokenizer.encode("hi", add_special_tokens=False)
        assert tokenizer.encode("hi") == [BOS, *plain]

    def test_bos_of_the_text_is_not_doubled(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")

    def test_two_bos_that_the_text_spells_stay_two(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("<s><s>", add_special_tokens=False) == [BOS, BOS]
        assert tokenizer.encode("<s><s>") == [BOS, BOS]

    def test_text_from_the_chat_template_has_one_bos(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}]))
        assert ids[0] == BOS
        assert ids.count(BOS) == 1

    def test_long_text_is_not_cut(self, tokenizer: Tokenizer) -> None:
        assert len(tokenizer.encode("x" * 500)) == 501

    def test_special_tokens_can_be_kept_in_the_text(self, tokenizer: Tokenizer) -> None:
        ids = [*tokenizer.encode("a", add_special_tokens=False), EOS]
        assert tokenizer.decode(ids) == "a"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a</s>"

    def test_decoding_does_not_tidy_up_spaces(self, tmp_path: Path) -> None:
        loaded = load(byte_level(tmp_path / "model", clean_up_tokenization_spaces=True))
        assert loaded.decode(loaded.encode("do n't , x .")) == "do n't , x ."


class TestChatTemplate:
    def test_messages_become_the_prompt(self, tokenizer: Tokenizer) -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        assert tokenizer.apply_chat_template(messages) == "<s>[user]x[assistant]y[assistant]"
        assert (
            tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s>[user]x[assistant]y"
        )

    def test_variables_reach_the_template(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], quiet=True).endswith("!")

    def test_a_missing_template_is_an_error_that_names_the_folder(self, tmp_path: Path) -> None:
        folder = byte_level(tmp_path / "model", chat_template=None)
        with pytest.raises(TokenizerError, match=rf"{folder} has no chat template"):
            load(folder).apply_chat_template([{"role": "user", "content": "x"}])

    def test_a_template_file_is_used(self, tmp_path: Path) -> None:
        folder = byte_level(tmp_path / "model", chat_template=None)
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}?")
        loaded = load(folder)
        assert loaded.apply_chat_template([{"role": "user", "content": "x"}]) == "x?"
        assert loaded.chat_template == "{{ messages[0]['content'] }}?"

    def test_messages_that_the_template_refuses_are_an_error(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(TokenizerError, match="no tools here"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


class TestIncrementalDecoding:
    def test_a_character_appears_when_its_last_byte_is_there(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a€b", add_special_tokens=False)
        decoder = IncrementalDecoder(tokenizer)
        assert [decoder.push([token]) for token in ids] == ["a", "", "", "€", "b"]
        assert decoder.finish() == ""
        assert decoder.text == "a€b"

    def test_bytes_that_stay_incomplete_come_at_the_end(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
        decoder = IncrementalDecoder(tokenizer)
        assert decoder.push(ids) == "a"
        assert decoder.finish() == tokenizer.decode(ids)[1:] != ""

    def test_special_tokens_are_left_out_or_kept_as_asked(self, tokenizer: Tokenizer) -> None:
        ids = [*tokenizer.encode("a", add_special_tokens=False), EOS]
        assert IncrementalDecoder(tokenizer).push(ids) == "a"
        assert IncrementalDecoder(tokenizer, skip_special_tokens=False).push(ids) == "a</s>"

    @given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 160), max_size=12))
    def test_pushes_join_to_the_whole_text_wherever_blocks_end(
        self, tokenizer: Tokenizer, text: str, cuts: list[int]
    ) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push(ids[a:b]) for a, b in pairwise(borders)]
        assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(ids)

    def test_text_that_a_decoder_takes_back_is_not_repeated(self) -> None:
        class Fickle:
            """Spells a run of bytes anew: one character, then all replacement marks, then two characters."""

            def decode(self, ids: list[int], **_: object) -> str:
                return {1: "€", 2: "\ufffd\ufffd", 3: "€€"}[len(ids)]

        decoder = IncrementalDecoder(Tokenizer(Fickle(), folder=None, size=0))  # type: ignore[arg-type]
        assert [decoder.push([0]), decoder.push([0]), decoder.push([0])] == ["€", "", "€"]
