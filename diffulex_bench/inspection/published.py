"""The bundled configurations, looked up by what they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from diffulex_bench.task_files import bundled_folder
from diffulex_bench.tiny import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Published", "find_published"]


@dataclass(frozen=True, slots=True)
class Published:
    """One bundled configuration: its name and what its engine section writes."""

    name: str
    engine: Mapping[str, Any]


def find_published(
    model_name: str, strategy: str, block_size: int | None, *, is_bundled: bool
) -> Published | None:
    """The first configuration of the family, the strategy and, unless it is None, the block.

    `is_bundled` asks for the configurations of the models in the box, which are no one else's.
    """
    for path in sorted(bundled_folder("configs").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        engine = content.get("engine") if isinstance(content, dict) else None
        if not isinstance(engine, dict) or engine.get("model_name") != model_name:
            continue
        is_for_bundled = str(engine.get("model_path", "")).startswith(PREFIX)
        has_block = block_size is None or engine.get("block_size") == block_size
        if engine.get("decoding_strategy") == strategy and has_block and is_for_bundled == is_bundled:
            return Published(path.stem, engine)
    return None
