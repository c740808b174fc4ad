"""A PEFT adapter folder: what its two files say, before any weight is loaded.

Read by the settings, so that an adapter that cannot be used is refused early, and by the model loader.
Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from diffulex.utils.weight_files import CheckpointError, read_headers, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.utils.weight_files import TensorHeader

__all__ = ["AdapterError", "AdapterFacts", "Targets", "read_adapter"]

Number = TypeVar("Number", int, float)

CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILE: Final = "adapter_model.safetensors"
ALL_LINEAR: Final = "all-linear"

# Keys that change what an adapter computes or add other weights; null, false or empty is fine.
_REFUSED_KEYS: Final = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "use_bdlora",
    "use_qalora",
)
# Ways to begin training that leave the base as it is. Others move a part of the base into the adapter.
_NEUTRAL_BEGINNINGS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
# With or without the adapter's name behind lora_A, as files of a training run have it.
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")


class AdapterError(CheckpointError):
    """An adapter folder that cannot be used as it is, or not with this model."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Which modules of the base an adapter changes, in the words of adapter_config.json.

    `modules` is a tuple of names, each of which stands for every module whose path ends with it, or one
    regular expression for the whole path, or "all-linear". `exclude` takes some out again. `layers` limits
    all to layers of these numbers, counted below a module that one of `layers_patterns` names.
    """

    modules: str | tuple[str, ...]
    exclude: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the config leaves it to the weights which modules are meant."""
        return self.modules == ALL_LINEAR

    def covers(self, module: str) -> bool:
        """Whether the adapter changes the linear layer `module`, a path in the base."""
        if self.exclude and _names(self.exclude, module):
            return False
        if self.is_open:
            return True
        if not _names(self.modules, module):
            return False
        return self.layers is None or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_patterns or (r"[^.]*",):
            if found := re.match(rf".*\.(?:{pattern})\.(\d+)\.", module):
                return int(found[1])
        return None


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What the files of an adapter folder say.

    Made by `read_adapter`, changed by nobody. `tensors` holds the name in the file of each module's A and B;
    `strange` are names in the file that are no such pair. `base` is what the adapter was made for, as its
    author's machine called it: for messages only.
    """

    path: Path
    base: str | None
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: Targets
    tensors: Mapping[str, Mapping[Literal["A", "B"], str]]
    strange: tuple[str, ...]
    headers: Mapping[str, TensorHeader]

    @property
    def weight_file(self) -> Path:
        """Where the tensors are."""
        return self.path / WEIGHT_FILE

    def rank_of(self, module: str) -> int:
        """Rows of A and columns of B."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Factor on ``B @ A``."""
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


def read_adapter(folder: str | Path) -> AdapterFacts:
    """The facts of the adapter in `folder`.

    Raises:
        AdapterError: the folder or one of its files is missing, or the configuration asks for what is not
            supported; every such key is named.
        CheckpointError: a file is damaged.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise AdapterError(
            f"lora_path must be the folder of an adapter, {str(folder)!r} is none; check the path, and "
            "download the adapter first if this is a hub id"
        )
    for name in (CONFIG_FILE, WEIGHT_FILE):
        if not (path / name).is_file():
            pickled = name == WEIGHT_FILE and (path / "adapter_model.bin").is_file()
            hint = "convert adapter_model.bin to it" if pickled else "complete the folder"
            raise AdapterError(f"lora_path {path} has no {name}; {hint}")
    config = _ConfigReader(path / CONFIG_FILE)
    config.refuse_unsupported()
    rank, alpha = (
        config.count("r", config.value("r")),
        config.number("lora_alpha", config.value("lora_alpha")),
    )
    rank_pattern = {key: config.count(f"rank_pattern[{key}]", n) for key, n in config.table("rank_pattern")}
    alpha_pattern = {
        key: config.number(f"alpha_pattern[{key}]", n) for key, n in config.table("alpha_pattern")
    }
    targets = config.targets()
    use_rslora = bool(config.value("use_rslora"))
    config.finish()
    headers = read_headers((path / WEIGHT_FILE,))
    tensors, strange = _pairs(headers)
    base = config.value("base_model_name_or_path")
    return AdapterFacts(
        path=path,
        base=base if isinstance(base, str) else None,
        rank=rank,
        alpha=alpha,
        use_rslora=use_rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        targets=targets,
        tensors=tensors,
        strange=strange,
        headers=headers,
    )


class _ConfigReader:
    """Reads adapter_config.json; wrong values are noted, `finish` raises when there were any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_json(path)
        self._problems: list[str] = []

    def value(self, key: str) -> Any:
        """What the file says, None when it says nothing."""
        return self._values.get(key)

    def refuse_unsupported(self) -> None:
        """Note every key that asks for another kind of adapter."""
        if self.value("peft_type") != "LORA":
            self._note("peft_type", "'LORA'", self.value("peft_type"))
        if self.value("bias") not in (None, "none"):
            self._note("bias", "'none', trained biases are not supported", self.value("bias"))
        for key in _REFUSED_KEYS:
            if self.value(key):
                self._note(key, "absent, null or false, what it asks for is not supported", self.value(key))
        beginning = self.value("init_lora_weights")
        if beginning not in _NEUTRAL_BEGINNINGS:
            rule = "one that leaves the base as it is; convert the adapter to a plain one with PEFT"
            self._note("init_lora_weights", rule, beginning)

    def count(self, key: str, value: object) -> int:
        """A positive whole number."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._note(key, "a positive whole number", value)
        return 1

    def number(self, key: str, value: object) -> float:
        """A finite number."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self._note(key, "a number", value)
        return 1.0

    def table(self, key: str) -> list[tuple[str, object]]:
        """Values by regular expression."""
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, dict):
            self._note(key, "a mapping from modules to numbers", value)
            return []
        self._check_patterns(key, list(value))
        return list(value.items())

    def targets(self) -> Targets:
        """Which modules the adapter changes."""
        modules = self._modules("target_modules")
        if not modules:
            self._note("target_modules", "a list of module names or a text", self.value("target_modules"))
        layers = self.value("layers_to_transform")
        numbers = [layers] if isinstance(layers, int) else layers or []
        if not isinstance(numbers, list) or not all(isinstance(one, int) for one in numbers):
            self._note("layers_to_transform", "a number or a list of numbers", layers)
            numbers = []
        patterns = self._modules("layers_pattern")
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        self._check_patterns("layers_pattern", patterns)
        return Targets(modules, self._modules("exclude_modules"), tuple(numbers) or None, patterns)

    def finish(self) -> None:
        """Raise an `AdapterError` that lists every problem noted."""
        if self._problems:
            raise AdapterError(f"{self._path} cannot be used: {'; '.join(self._problems)}")

    def _modules(self, key: str) -> str | tuple[str, ...]:
        value = self.value(key)
        if value is None:
            return ()
        if isinstance(value, str):
            if value != ALL_LINEAR:
                self._check_patterns(key, [value])
            return value
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        self._note(key, "a list of names or a text", value)
        return ()

    def _check_patterns(self, key: str, patterns: list[str] | tuple[str, ...]) -> None:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error:
                self._note(key, "a regular expression", pattern)

    def _note(self, key: str, rule: str, value: object) -> None:
        stated = "it is absent" if value is None else f"it is {value!r}"
        self._problems.append(f"{key} must be {rule}, {stated}")


def _pairs(
    headers: Mapping[str, TensorHeader],
) -> tuple[dict[str, dict[Literal["A", "B"], str]], tuple[str, ...]]:
    """The names of each module's A and B, and all names that are neither or come a second time."""
    tensors: dict[str, dict[Literal["A", "B"], str]] = {}
    strange = []
    for name in headers:
        found = _TENSOR.fullmatch(name)
        side: Literal["A", "B"] = "A" if found and found[2] == "A" else "B"
        if found is None or side in tensors.get(found[1], {}):
            strange.append(name)
        else:
            tensors.setdefault(found[1], {})[side] = name
    return tensors, tuple(strange)


def _names(modules: str | tuple[str, ...], module: str) -> bool:
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in modules)


def _by_pattern(table: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that `module` ends with; a pattern begins where a name begins."""
    for pattern, value in table.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default
