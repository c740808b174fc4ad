"""Settings of the checkpoint: which folder, which family, which tokenizer."""

from dataclasses import dataclass

from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.settings.spec import setting

__all__ = ["ModelSettings"]


@dataclass(frozen=True)
class ModelSettings:
    """Which model runs."""

    model: str = setting(
        "",
        help="Local folder of the checkpoint.",
        kw_only=False,
        file_name="model_path",
        required=True,
    )
    tokenizer_path: str | None = setting(None, help="Folder of the tokenizer; null takes the checkpoint's.")
    model_name: str = setting(
        "dream", help="Model family: adapter, prediction shift and defaults.", choices=tuple(MODEL_DEFAULTS)
    )
    mask_token_id: int = setting(
        151666,
        help="Id of a masked position; unless written, the checkpoint's and tokenizer's files decide.",
        low=0,
    )
    trust_remote_code: bool = setting(
        False, help="Let the tokenizer loader run code that a checkpoint brings."
    )
