"""Settings of the Fast-dLLM v2 decoder."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["FastDllmSettings"]


@dataclass(frozen=True)
class FastDllmSettings:
    """The dual cache of strategy fast_dllm_v2."""

    fdv2_use_block_cache: bool = setting(
        True, help="Recompute only the current sub-block; False recomputes the whole buffer each step."
    )
