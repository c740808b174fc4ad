"""Byte-level BPE tokenizer of the tiny models: every digit is one token, words keep their leading space."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

EOS_TOKEN: Final = "<|endoftext|>"
MASK_TOKEN: Final = "<|mask|>"
PAD_TOKEN: Final = "<|pad|>"
EOS_ID: Final = 0
MASK_ID: Final = 1
PAD_ID: Final = 2
SPECIAL_TOKENS: Final = (EOS_TOKEN, MASK_TOKEN, PAD_TOKEN)

# Words, single digits, newlines, signs (with the space in front of a following digit), other spaces.
_PIECES: Final = r" ?[A-Za-z]+|[0-9]|\n| ?[^\sA-Za-z0-9]+(?: (?=[0-9]))?|\s"


class TextEncoder:
    """Turns text into token ids, one lookup a piece; made by `train_tokenizer` or from a checkpoint folder.

    Gives the same ids as the tokenizer file it was made from, but many times faster, because BPE never merges
    across pieces and the pieces of generated problems repeat.
    """

    def __init__(self, tokenizer: Any) -> None:  # a tokenizers.Tokenizer, which ships no usable types
        self.tokenizer = tokenizer
        self._ids_of_piece: dict[str, list[int]] = {}

    @classmethod
    def load(cls, folder: Path) -> "TextEncoder":
        """Return the encoder of the ``tokenizer.json`` in a folder.

        Raises:
            ValueError: The folder holds no such file.
        """
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer.json in {folder}; name a folder that holds a trained tokenizer")
        return cls(Tokenizer.from_file(str(path)))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        known = self._ids_of_piece
        ids: list[int] = []
        for piece in re.findall(_PIECES, text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self._piece_ids(piece)
            ids += found
        return ids

    def _piece_ids(self, piece: str) -> list[int]:
        # A sign keeps the space behind it only in front of a digit, so such a piece is encoded with one.
        if len(piece) > 1 and piece.endswith(" "):
            return list(self.tokenizer.encode(f"{piece}0", add_special_tokens=False).ids[:-1])
        return list(self.tokenizer.encode(piece, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextEncoder:
    """Return a tokenizer trained on the texts; ids 0, 1, 2 are end of text, mask and padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextEncoder(tokenizer)


def save_tokenizer(encoder: TextEncoder, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and its two companions, so that `AutoTokenizer` loads the folder as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": EOS_TOKEN, "mask_token": MASK_TOKEN, "pad_token": PAD_TOKEN}
    config = {
        **names,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
