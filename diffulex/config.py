"""`Config`: all sections of settings joined under flat names, resolved and checked when it is made."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from diffulex.logger import get_logger
from diffulex.profiling import ProfilerSettings
from diffulex.sampling_params import SamplingParams
from diffulex.settings.adapter_rules import check_adapter
from diffulex.settings.aliases import rename
from diffulex.settings.cache import CacheSettings
from diffulex.settings.checkpoint_rules import apply_checkpoint
from diffulex.settings.decoding import DecodingSettings
from diffulex.settings.draft import CLASS_DEFAULT, Draft, Hardware
from diffulex.settings.edit import EditSettings
from diffulex.settings.fast_dllm import FastDllmSettings
from diffulex.settings.gemma import GemmaSettings
from diffulex.settings.lora import LoraSettings
from diffulex.settings.model import ModelSettings
from diffulex.settings.moe import MoeSettings
from diffulex.settings.parallel import ParallelSettings
from diffulex.settings.provenance import ExplainRow, Provenance
from diffulex.settings.resolve import THRESHOLD_NAMES, apply_machine, resolve_settings
from diffulex.settings.rules import FIRST_RULES
from diffulex.settings.runtime import RuntimeSettings
from diffulex.settings.scheduling import SchedulingSettings
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex.settings.spec import ConfigError, settings_of, unknown_name
from diffulex.settings.thresholds import DecodingThresholds, ThresholdSettings
from diffulex.utils.device import device_facts, dtype_for
from diffulex.utils.registry import did_you_mean
from diffulex.vllm_compat import has_vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.utils.checkpoint import CheckpointFacts

__all__ = ["Config", "ConfigError", "DecodingThresholds", "ExplainRow"]

logger = get_logger(__name__)

ENGINE_SETTINGS = settings_of(*ENGINE_SECTIONS)
DEFAULTS: Mapping[str, Any] = {name: info.default for name, info in ENGINE_SETTINGS.items()}


@dataclass(frozen=True)
class Config(
    LoraSettings,
    FastDllmSettings,
    GemmaSettings,
    MoeSettings,
    EditSettings,
    ParallelSettings,
    RuntimeSettings,
    CacheSettings,
    SchedulingSettings,
    ThresholdSettings,
    DecodingSettings,
    ModelSettings,
):
    """The settings of one engine, resolved: what the attributes say is what runs.

    Made by the program or the bench, changed by nobody. Two configurations are equal when their resolved
    settings are, wherever these came from; `dataclasses.replace` keeps what is known of their origin.

    Attributes:
        checkpoint: What the files of the checkpoint folder say.
        eos_token_ids: Ids that end an answer.
        vocab_limit: Ids from here on are unknown to the tokenizer and never sampled.

    Raises:
        ConfigError: a ValueError that lists every setting that cannot be used.
    """

    provenance: Provenance = field(default=Provenance(), kw_only=True, compare=False, repr=False)
    checkpoint: CheckpointFacts = field(init=False, compare=False, repr=False)
    eos_token_ids: tuple[int, ...] = field(init=False, compare=False, repr=False)
    vocab_limit: int = field(init=False, compare=False, repr=False)

    # A dataclass cannot tell a written default from an omitted one, so the written names are kept here.
    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """An empty object that knows which settings are written."""
        self = super().__new__(cls)
        written = {*keywords, *list(ENGINE_SETTINGS)[: len(args)]} - {"provenance"}
        object.__setattr__(self, "_written", frozenset(written))
        return self

    def __post_init__(self) -> None:
        draft = self._new_draft()
        resolve_settings(draft, ENGINE_SETTINGS, FIRST_RULES)
        checkpoint = apply_checkpoint(draft)
        check_adapter(draft)
        apply_machine(draft)
        _check_profiler(draft)
        if draft.problems or checkpoint is None:
            raise ConfigError(draft.sentences())
        if draft.values["dtype"] == "auto":
            device = draft.values["device"]
            draft.set("dtype", dtype_for(device, checkpoint.torch_dtype), f"auto: runs on {device}")
        thresholds = {name: draft.values[name] for name in THRESHOLD_NAMES}
        draft.values["decoding_thresholds"] = DecodingThresholds(**thresholds)
        derived = {
            "checkpoint": checkpoint,
            "eos_token_ids": checkpoint.eos_token_ids,
            "vocab_limit": min(checkpoint.tokenizer_size, checkpoint.vocab_size),
            "provenance": Provenance(
                frozenset(draft.explicit),
                draft.origins,
                dict(draft.values),
                self.provenance.measured - draft.explicit,
                self.provenance.ignored,
            ),
        }
        for name, value in {**draft.values, **derived}.items():
            object.__setattr__(self, name, value)
        for level, text in draft.notes:
            logger.log(level, "%s", text)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """A configuration from a program's keywords: old names work, unknown ones are ignored with a warning.

        `ignored_keywords` of the result lists the unknown ones.
        """
        values, deprecated, problems = rename(keywords)
        if problems:
            raise ConfigError([text for _, text in problems])
        for line in deprecated:
            logger.warning("%s", line)
        unknown = tuple(name for name in values if name not in ENGINE_SETTINGS)
        if unknown:
            logger.warning("ignored unknown keyword arguments: %s", ", ".join(map(_unknown_keyword, unknown)))
        known = {name: value for name, value in values.items() if name in ENGINE_SETTINGS}
        return cls(**known, provenance=Provenance(ignored=unknown))

    @classmethod
    def from_sources(cls, values: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        """A configuration from files and flags; `origins` says of each name where it was written.

        Raises:
            ConfigError: a name is unknown, or a setting cannot be used.
        """
        unknown = [
            unknown_name(name, list(ENGINE_SETTINGS)) for name in values if name not in ENGINE_SETTINGS
        ]
        if unknown:
            raise ConfigError(unknown)
        return cls(**values, provenance=Provenance(origins=dict(origins)))

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the settings the user wrote."""
        return self.provenance.explicit

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each value comes from, in words, by name."""
        return self.provenance.origins

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Keywords of `from_keywords` that no setting has."""
        return self.provenance.ignored

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The contents of the checkpoint's config.json."""
        return self.checkpoint.config

    def resolved(self, origin: str = "measured at start", **values: Any) -> Self:
        """A copy with values that the engine found out; they do not count as written by the user."""
        changed = copy.copy(self)
        origins = {**self.origins, **dict.fromkeys(values, origin)}
        resolved = {**self.provenance.resolved, **values}
        measured = self.provenance.measured | set(values)
        provenance = replace(self.provenance, origins=origins, resolved=resolved, measured=measured)
        for name, value in {**values, "provenance": provenance}.items():
            object.__setattr__(changed, name, value)
        return changed

    def as_dict(self) -> dict[str, Any]:
        """All resolved settings by name; `Config(**config.as_dict())` equals this configuration."""
        return {name: getattr(self, name) for name in ENGINE_SETTINGS}

    def explain(self) -> list[ExplainRow]:
        """Every setting with its resolved value, where the value comes from, and its help."""
        return [
            ExplainRow(name, getattr(self, name), self.origins[name], info.setting.help)
            for name, info in ENGINE_SETTINGS.items()
            if name != "decoding_thresholds"
        ]

    def _new_draft(self) -> Draft:
        names: frozenset[str] = self.__dict__["_written"]
        given = {name: getattr(self, name) for name in ENGINE_SETTINGS if name in names}
        written = self.provenance.written(given)
        changed = self.provenance.changed(given)
        if "decoding_thresholds" in changed:
            # New thresholds replace carried-over flat ones, which would win if they counted as written.
            written = {
                name: origin
                for name, origin in written.items()
                if name in changed or name not in THRESHOLD_NAMES
            }
        elif any(name in THRESHOLD_NAMES for name in changed):
            # The carried-over object holds the old value, which would contradict the new one.
            written.pop("decoding_thresholds", None)
        carried = self.provenance.kept_measurements(given)
        values = {**DEFAULTS, **{name: given[name] for name in (*written, *carried)}}
        origins = {name: written.get(name, CLASS_DEFAULT) for name in ENGINE_SETTINGS}
        origins |= {name: self.origins[name] for name in carried}
        return Draft(values, set(written), origins, DEFAULTS, _hardware)


def _unknown_keyword(name: str) -> str:
    if name in settings_of(SamplingParams):
        return f"{name} (a field of SamplingParams)"
    return f"{name}{did_you_mean(name, ENGINE_SETTINGS)}"


def _check_profiler(draft: Draft) -> None:
    options = draft.values["profiler_config"]
    if options is None:
        return
    try:
        settings = ProfilerSettings.from_mapping(options)
    except ConfigError as error:
        for text in error.problems:
            draft.refuse("profiler_config", text)
        return
    if settings.wants_cuda and draft.values["device"] == "cpu":
        draft.refuse(
            "profiler_config",
            "profiler_config: activity 'cuda' needs device='cuda', the model runs on 'cpu'; drop it",
        )


def _hardware() -> Hardware:
    facts = device_facts()
    return Hardware(facts.has_cuda, facts.device_count, has_vllm())
