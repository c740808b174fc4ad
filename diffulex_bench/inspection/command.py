"""The command line that runs a checkpoint: with its family's bundled configuration, or with plain flags."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from diffulex.config import DEFAULTS, ENGINE_SETTINGS
from diffulex.settings.defaults import STRATEGY_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffulex_bench.inspection.asked import Asked

__all__ = ["ready_command"]

_TASK: Final = "gsm8k_diffulex"
_FEW: Final = 10
_ADAPTER: Final = "/path/to/adapter"


def ready_command(model_label: str, asked: Asked, *, has_chat_template: bool) -> str:
    """The words of a run of `model_label` under the asked settings, quoted for a shell."""
    words = ["--model-path", model_label]
    if asked.published is not None:
        words = ["--config", asked.published.name, *words]
        words += ["--lora-path", _ADAPTER] if asked.published.engine.get("use_lora") else []
        words += _flags(asked.flags, asked.published.engine)
    else:
        forced = STRATEGY_DEFAULTS[asked.strategy].forces
        flags: dict[str, Any] = {"model_name": asked.model_name, "decoding_strategy": asked.strategy}
        flags |= {} if "block_size" in forced else {"block_size": asked.block_size}
        sizes = {"buffer_size": asked.buffer_size, "page_size": asked.page_size}
        flags |= {name: size for name, size in sizes.items() if name not in forced and size != DEFAULTS[name]}
        words += _flags({**flags, **asked.flags}, {})
        words += ["--apply-chat-template"] if has_chat_template else []
        words += ["--dataset-name", _TASK]
    return shlex.join(["diffulex-bench", *words, "--dataset-limit", str(_FEW)])


def _flags(values: Mapping[str, Any], settled: Mapping[str, Any]) -> Iterator[str]:
    """Flags of all values that are not settled already."""
    for name, value in values.items():
        if settled.get(name) != value:
            yield f"--{ENGINE_SETTINGS[name].file_name.replace('_', '-')}"
            yield str(value)
