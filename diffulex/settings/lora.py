"""Settings of LoRA adapters."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["LoraSettings"]


@dataclass(frozen=True)
class LoraSettings:
    """An adapter beside or inside the weights."""

    use_lora: bool = setting(False, help="Load an adapter.")
    lora_path: str = setting("", help="Folder of the adapter; needed with use_lora.")
    pre_merge_lora: bool = setting(False, help="Merge the adapter into the weights while loading.")
