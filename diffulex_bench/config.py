"""`BenchConfig`: the ``engine`` and ``eval`` sections of one run, merged from files, overrides and flags.

Read by `diffulex_bench.main` from the command line and by the lm-eval adapter from ``--model_args``.
Importing this module loads neither torch nor lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from diffulex.config import Config, ConfigError
from diffulex.settings.layers import Layer, layer_of, merge
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex.settings.sources import Sections, load_yaml
from diffulex.settings.spec import setting, settings_of, unknown_name
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.tiny import PREFIX, bundled_model

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BENCH_SECTIONS", "BenchConfig", "EvalSettings"]

#: The bench's own defaults of engine settings.
ENGINE_DEFAULTS: Mapping[str, Any] = {"tensor_parallel_size": 1}
BENCH_DEFAULT = "bench default"
DEFAULT = "default"
_WRITTEN = ("yaml ", "flag ", "--set ", "keyword", "model_args")
LIMIT_HINT = "; give a positive whole number, or null for the whole task"


@dataclass(frozen=True, kw_only=True)
class _Origins:
    """The section ``origins`` of a run's own ``config.yaml``, which makes that file a configuration again."""

    engine: Mapping[str, object] | None = setting(None, help="Origins of engine values.", flag=False)
    eval: Mapping[str, object] | None = setting(None, help="Origins of eval values.", flag=False)


BENCH_SECTIONS: Sections = {"engine": ENGINE_SECTIONS, "eval": (EvalSettings,)}
_FILE_SECTIONS: Sections = {**BENCH_SECTIONS, "origins": (_Origins,)}


@dataclass(frozen=True)
class BenchConfig:
    """The settings of one run.

    Attributes:
        engine: engine settings that were written, and the bench's own defaults.
        engine_origins: where each of them was written.
        eval: the evaluation's settings.
        eval_origins: where those of its values were written that were.
        config_files: files that were read, the last one winning.
    """

    engine: Mapping[str, Any]
    engine_origins: Mapping[str, str]
    eval: EvalSettings
    eval_origins: Mapping[str, str] = field(default_factory=dict)
    config_files: tuple[Path, ...] = ()

    @classmethod
    def load(
        cls, files: Sequence[Path] = (), overrides: Sequence[str] = (), flags: Layer | None = None
    ) -> Self:
        """Settings of ``files``, ``overrides`` (``engine.block_size=16``) and ``flags``, later ones winning.

        The engine's configuration is made as well, so that every fault is reported at once.

        Raises:
            ConfigError: a fault of a file, a name or a value.
            BenchError: no bundled model has the name that was written.
        """
        try:
            written = merge(_without_defaults(load_yaml(files, overrides, _FILE_SECTIONS)), flags or Layer())
        except ConfigError as error:
            raise ConfigError([_with_hint(problem) for problem in error.problems]) from error
        return cls._checked(written, tuple(files))

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], origin: str) -> Self:
        """The settings of one flat mapping; each name finds its section.

        Raises:
            ConfigError: an unknown name, or a value that cannot be used.
        """
        engine_names, eval_names = settings_of(*ENGINE_SECTIONS), settings_of(EvalSettings)
        renamed = {"model" if name == "model_path" else name: value for name, value in values.items()}
        known = [*engine_names, *eval_names]
        unknown = [unknown_name(name, known) for name in renamed if name not in known]
        if unknown:
            raise ConfigError(unknown)
        engine = {name: value for name, value in renamed.items() if name in engine_names}
        evaluation = {name: value for name, value in renamed.items() if name in eval_names}
        layer = merge(layer_of("engine", engine, origin), layer_of("eval", evaluation, origin))
        return cls._checked(layer, ())

    @classmethod
    def _checked(cls, written: Layer, files: tuple[Path, ...]) -> Self:
        own = layer_of("engine", ENGINE_DEFAULTS, BENCH_DEFAULT)
        merged = merge(own, written)
        problems: list[str] = []
        evaluation = EvalSettings()
        try:
            evaluation = EvalSettings(**merged.values.get("eval", {}))
        except ConfigError as error:
            problems += error.problems
        made = cls(
            merged.values["engine"],
            merged.origins["engine"],
            evaluation,
            merged.origins.get("eval", {}),
            files,
        )
        try:
            made.engine_config  # noqa: B018  # made here so that its faults are reported with the others
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError([_with_hint(problem) for problem in problems])
        return made

    @cached_property
    def engine_config(self) -> Config:
        """The engine's resolved configuration; reads the checkpoint's facts, not its weights."""
        values = dict(self.engine)
        if str(values.get("model", "")).startswith(PREFIX):
            values["model"] = str(bundled_model(values["model"]))
        return Config.from_sources(values, self.engine_origins)

    @property
    def explicit_eval(self) -> frozenset[str]:
        """Names of ``eval`` values that the user wrote."""
        return frozenset(self.eval_origins)

    @property
    def model_label(self) -> str:
        """The model as it was written: a folder or a bundled name."""
        return str(self.engine["model"])

    def search_folders(self, name: str) -> list[Path]:
        """Folders for a relative path in the ``eval`` setting ``name``, in order.

        A path written in a YAML file stands relative to that file, otherwise to the working folder; the other
        places are tried afterwards.
        """
        origin = self.eval_origins.get(name, "")
        homes = [file.absolute().parent for file in reversed(self.config_files)]
        if origin.startswith("yaml "):
            writer = Path(origin.removeprefix("yaml ").rpartition(":")[0]).absolute().parent
            return list(dict.fromkeys([writer, Path.cwd(), *homes]))
        return list(dict.fromkeys([Path.cwd(), *homes]))

    def check_chat_template(self) -> None:
        """Nothing when no template is needed or the tokenizer has one.

        Raises:
            BenchError: the tokenizer has none.
        """
        if not self.eval.apply_chat_template:
            return
        from diffulex.utils.tokenizer import load_tokenizer

        config = self.engine_config
        if not load_tokenizer(
            config.checkpoint, config.tokenizer_path, config.trust_remote_code
        ).chat_template:
            place = config.tokenizer_path or config.model
            raise BenchError(
                f"apply_chat_template is true but the tokenizer in {place} has no chat template; set it to "
                "false, or add chat_template.jinja to that folder"
            )

    def explain(self) -> dict[str, list[tuple[str, Any, str]]]:
        """Section -> rows of name as in YAML, resolved value and origin."""
        infos = settings_of(*ENGINE_SECTIONS)
        engine = [
            (infos[row.name].file_name, self.model_label if row.name == "model" else row.value, row.origin)
            for row in self.engine_config.explain()
        ]
        evaluation = [
            (name, value, self.eval_origins.get(name, DEFAULT)) for name, value in self.eval.as_dict().items()
        ]
        return {"engine": engine, "eval": evaluation}

    def as_document(self) -> dict[str, dict[str, Any]]:
        """``engine``, ``eval`` and ``origins`` as plain data; read as a file it gives the same run."""
        rows = self.explain()
        document: dict[str, dict[str, Any]] = {
            section: {name: _plain(value) for name, value, _ in rows[section]} for section in rows
        }
        for name in ("dataset_data_files", "include_path"):
            value = document["eval"][name]
            if value:
                found = [folder / value for folder in self.search_folders(name) if (folder / value).exists()]
                document["eval"][name] = str(found[0]) if found else value
        document["origins"] = {
            section: {name: origin for name, _, origin in rows[section]} for section in rows
        }
        return document


def _without_defaults(layer: Layer) -> Layer:
    """The layer without its ``origins`` section and without values that it marks as not written by a user."""
    marked = layer.values.get("origins", {})
    values, origins = {}, {}
    for section in BENCH_SECTIONS:
        infos = settings_of(*BENCH_SECTIONS[section])
        noted = marked.get(section) or {}
        derived = {
            name
            for name, info in infos.items()
            if info.file_name in noted and not str(noted[info.file_name]).startswith(_WRITTEN)
        }
        written = {
            name: value for name, value in layer.values.get(section, {}).items() if name not in derived
        }
        values[section] = written
        origins[section] = {name: layer.origins[section][name] for name in written}
    return Layer(values, origins)


def _with_hint(problem: str) -> str:
    return problem + LIMIT_HINT if "dataset_limit must be" in problem else problem


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value
