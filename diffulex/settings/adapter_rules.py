"""What the files of an adapter decide: whether it can be used at all, asked before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.utils.adapter_files import read_adapter
from diffulex.utils.checkpoint import CheckpointError

if TYPE_CHECKING:
    from diffulex.settings.draft import Draft

__all__ = ["check_adapter"]


def check_adapter(draft: Draft) -> None:
    """Refuse an adapter whose folder is missing, damaged, or asks for what is not supported."""
    if not draft.values["use_lora"] or draft.is_broken("use_lora", "lora_path"):
        return
    try:
        read_adapter(draft.values["lora_path"])
    except CheckpointError as error:
        draft.refuse("lora_path", str(error))
