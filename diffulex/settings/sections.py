"""The engine's sections, in the order of the reference tables."""

from typing import Final

from diffulex.settings.cache import CacheSettings
from diffulex.settings.decoding import DecodingSettings
from diffulex.settings.edit import EditSettings
from diffulex.settings.fast_dllm import FastDllmSettings
from diffulex.settings.gemma import GemmaSettings
from diffulex.settings.lora import LoraSettings
from diffulex.settings.model import ModelSettings
from diffulex.settings.moe import MoeSettings
from diffulex.settings.parallel import ParallelSettings
from diffulex.settings.runtime import RuntimeSettings
from diffulex.settings.scheduling import SchedulingSettings
from diffulex.settings.thresholds import ThresholdSettings

__all__ = ["ENGINE_SECTIONS"]

ENGINE_SECTIONS: Final[tuple[type, ...]] = (
    ModelSettings,
    DecodingSettings,
    ThresholdSettings,
    SchedulingSettings,
    CacheSettings,
    RuntimeSettings,
    ParallelSettings,
    EditSettings,
    MoeSettings,
    GemmaSettings,
    FastDllmSettings,
    LoraSettings,
)
