"""From the text of a request to its tokens: the BOS rule, the window, stop strings that are single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence


class BenchTokenizer(Protocol):
    """The part of `diffulex.utils.tokenizer.Tokenizer` that the bench uses."""

    @property
    def bos_token(self) -> str | None:
        """Text of the begin-of-sequence token."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of ``text``; a BOS that the text already holds is not added again."""
        ...

    def decode(self, token_ids: Sequence[int], /, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]], /) -> str:
        """The conversation as a prompt that ends where the assistant begins."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it goes to the engine.

    Attributes:
        text: the text that `token_ids` stand for.
        token_ids: its tokens.
        num_cut: tokens dropped from the left.
        too_long: it did not fit the window.
        error: why it cannot run, None when it can.
    """

    text: str
    token_ids: list[int]
    num_cut: int = 0
    too_long: bool = False
    error: str | None = None


class PromptBuilder:
    """Tokenises prompts by the rules of one run.

    ``add_bos_token``: None leaves it to the tokenizer, True puts exactly one BOS in front, False adds none; a
    text that already begins with BOS never gets a second one. ``overlong`` says what happens to a prompt that
    leaves no room for an answer token in ``window``: ``error`` refuses it, ``left`` keeps its end.

    Raises:
        BenchError: ``add_bos_token`` is True and the tokenizer has no BOS.
    """

    def __init__(
        self, tokenizer: BenchTokenizer, *, add_bos_token: bool | None, overlong: str, window: int
    ) -> None:
        self._tokenizer = tokenizer
        self._overlong = overlong
        self._window = window
        self._add_bos = add_bos_token
        self._stop_ids: dict[str, int | None] = {}
        if add_bos_token and not tokenizer.bos_token:
            raise BenchError("add_bos_token is true but the tokenizer has no BOS token; leave it unset")

    def build(self, text: str, max_tokens: int) -> Prompt:
        """The prompt for ``text``; a cut from the left leaves room for ``max_tokens``, or half the window."""
        ids = self._encode(text)
        if len(ids) < self._window:
            return Prompt(text, ids)
        if self._overlong == "error":
            message = (
                f"prompt of {len(ids)} tokens leaves no room for an answer in max_model_len "
                f"({self._window}); raise max_model_len or set overlong_prompt to left"
            )
            return Prompt(text, ids, too_long=True, error=message)
        keep = max(self._window - max_tokens, self._window // 2, 1)
        bos = self._encode_bos() if ids[:1] == self._encode_bos() else []
        kept = bos + ids[len(ids) - (keep - len(bos)) :]
        visible = self._tokenizer.decode(kept, skip_special_tokens=False)
        return Prompt(visible, kept, num_cut=len(ids) - len(kept), too_long=True)

    def split_stops(self, stops: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings for the engine, and ids of those that are one special token.

        Special tokens leave no trace in the text, so ``<|im_end|>`` can only be found as a token.
        """
        ids = [stop_id for stop in stops if (stop_id := self._special_id(stop)) is not None]
        return tuple(stops), tuple(ids)

    def _special_id(self, stop: str) -> int | None:
        if stop not in self._stop_ids:
            ids = self._tokenizer.encode(stop, add_special_tokens=False)
            special = len(ids) == 1 and self._tokenizer.decode(ids) == ""
            self._stop_ids[stop] = ids[0] if special else None
        return self._stop_ids[stop]

    def _encode(self, text: str) -> list[int]:
        if self._add_bos is None:
            return self._tokenizer.encode(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        bos = self._encode_bos() if self._add_bos else []
        return ids if ids[:1] == bos else bos + ids

    def _encode_bos(self) -> list[int]:
        bos = self._tokenizer.bos_token
        return self._tokenizer.encode(bos, add_special_tokens=False) if bos else []
