"""Settings of LoRA adapters."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["LoraSettings"]


@dataclass(frozen=True)
class LoraSettings:
    """An adapter beside or inside the weights."""

    use_lora: bool = setting(False, help="Load a PEFT LoRA adapter made for the checkpoint.")
    lora_path: str = setting("", help="Local folder of the adapter; needed with use_lora.")
    pre_merge_lora: bool = setting(
        False, help="Add the adapter to the weights while loading; else it is computed beside them."
    )
