"""The tokenizer of a checkpoint: encode, decode, chat template, and text that is stable while tokens arrive.

Made by the engine from the same facts as the model. Imports transformers only when a tokenizer is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.logger import get_logger
from diffulex.utils.weight_files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.utils.checkpoint import CheckpointFacts

logger = get_logger(__name__)
_REPLACEMENT = "\ufffd"
# Classes that come as code with a checkpoint and read vocab.json and merges.txt exactly as Qwen2's does.
_COPIES_OF_QWEN2 = frozenset({"DreamTokenizer"})


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or lacks what was asked of it."""


class Tokenizer:
    """Text to ids and back; made by `load_tokenizer`.

    `size` counts the ids that the tokenizer knows; ids from there on are padding of the vocabulary.
    """

    def __init__(self, backend: Any, folder: Path, size: int) -> None:
        # A PreTrainedTokenizerBase; transformers ships no types that mypy could check it with.
        self._backend = backend
        self.folder = folder
        self.size = size

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence, None when there is none."""
        token: str | None = self._backend.bos_token
        return token

    @property
    def bos_token_id(self) -> int | None:
        """Id of `bos_token`."""
        token_id: int | None = self._backend.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence; a checkpoint's files may name more, see `CheckpointFacts`."""
        token_id: int | None = self._backend.eos_token_id
        return token_id

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, None when the tokenizer has none."""
        template = self._backend.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template if isinstance(template, str) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        With `add_special_tokens` the tokenizer may put its BOS in front, unless the text begins with it,
        as text from a chat template does: BOS is never doubled.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids, exactly as the tokens spell it; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The prompt of a conversation; `variables` such as ``enable_thinking=False`` reach the template.

        Raises:
            TokenizerError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise TokenizerError(
                f"the tokenizer in {self.folder} has no chat template; give plain prompts, or add "
                "chat_template.jinja to the folder"
            )
        from jinja2 import TemplateError

        try:
            text: str = self._backend.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except TemplateError as error:
            raise TokenizerError(
                f"the chat template in {self.folder} refuses the messages: {error}; change the messages"
            ) from error
        return text


class IncrementalDecoder:
    """Text of a growing answer: each push returns what is final, the pushes joined are the whole text.

    One per request and stream, made and fed by whoever shows text early. The end of an incomplete UTF-8
    sequence is held back until its bytes are there or `finish` is called.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that has become final with them."""
        self._ids.extend(ids)
        return self._emit(self._decoded().rstrip(_REPLACEMENT))

    def finish(self) -> str:
        """The text that was held back; bytes that never became a character are U+FFFD."""
        return self._emit(self._decoded())

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special_tokens)

    def _emit(self, stable: str) -> str:
        """What `stable` adds to the emitted text; nothing when it does not continue it."""
        if not stable.startswith(self.text):
            # Some decoders spell a whole run of bytes anew until its last one is there.
            return ""
        added = stable[len(self.text) :]
        self.text = stable
        return added


def load_tokenizer(
    facts: CheckpointFacts, tokenizer_path: str | Path | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer of `tokenizer_path`, or of the checkpoint when that is None.

    Raises:
        TokenizerError: the files cannot be read without code from the checkpoint, or are damaged.
    """
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

    folder = facts.tokenizer_path if tokenizer_path is None else Path(tokenizer_path).expanduser()
    try:
        # An empty configuration: transformers does not know our families, their config.json would only be
        # warned about.
        backend = AutoTokenizer.from_pretrained(
            folder, config=PreTrainedConfig(), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (ValueError, OSError, KeyError, ImportError, AttributeError) as error:
        if _is_copy_of_qwen2(folder):
            from transformers import Qwen2Tokenizer

            backend = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        elif not (folder / "tokenizer.json").is_file():
            raise TokenizerError(
                f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}; add a tokenizer.json, or "
                "set trust_remote_code to run the code that comes with the checkpoint, if you trust it"
            ) from error
        else:
            logger.info("%s: reading tokenizer.json directly, since %s", folder, _first_line(error))
            backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return Tokenizer(backend, folder, max(len(backend), _highest_id(backend) + 1))


def _is_copy_of_qwen2(folder: Path) -> bool:
    """The folder has Qwen2's vocabulary files, no tokenizer.json, and names a class known to be a copy."""
    if (folder / "tokenizer.json").is_file() or not (folder / "merges.txt").is_file():
        return False
    config = folder / "tokenizer_config.json"
    return config.is_file() and read_json(config).get("tokenizer_class") in _COPIES_OF_QWEN2


def _highest_id(backend: Any) -> int:
    return max(backend.get_vocab().values(), default=-1)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
