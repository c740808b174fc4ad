"""`BenchConfig`: the ``engine`` and ``eval`` sections of one run, merged from files, overrides and flags.

Read by `diffulex_bench.main` from the command line and by the lm-eval adapter from ``--model_args``.
Importing this module loads neither torch nor lm-eval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from diffulex.config import Config, ConfigError
from diffulex.settings.layers import Layer, layer_of, merge
from diffulex.settings.sections import ENGINE_SECTIONS
from diffulex.settings.sources import Sections, read_layer
from diffulex.settings.spec import settings_of, unknown_name
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.run_config import ORIGINS, origins_section, plain, without_derived
from diffulex_bench.task_files import unknown_tasks
from diffulex_bench.tiny import PREFIX, bundled_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.settings.yaml_files import YamlFile

__all__ = ["BENCH_SECTIONS", "BenchConfig", "EvalSettings"]

#: The bench's own defaults of engine settings.
ENGINE_DEFAULTS: Mapping[str, Any] = {"tensor_parallel_size": 1}
BENCH_DEFAULT = "bench default"
DEFAULT = "default"
LIMIT_HINT = "; give a positive whole number, or null for the whole task"

BENCH_SECTIONS: Sections = {"engine": ENGINE_SECTIONS, "eval": (EvalSettings,)}


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

        The engine's configuration is made as well, so that every fault is reported at once. Of a run's own
        ``config.yaml`` only what somebody wrote counts.

        Raises:
            ConfigError: a fault of a file, a name or a value.
            BenchError: no bundled model has the name that was written.
        """
        layer, faults = read_layer(files, overrides, BENCH_SECTIONS, _without_derived)
        return cls._checked(merge(layer, flags or Layer()), tuple(files), faults)

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
    def _checked(cls, written: Layer, files: tuple[Path, ...], faults: Sequence[str] = ()) -> Self:
        """The settings ``written``; ``faults`` are those of settings that are left out of them."""
        own = layer_of("engine", ENGINE_DEFAULTS, BENCH_DEFAULT)
        merged = merge(own, written)
        problems = list(faults)
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
            # Made here so that its faults are reported with the others. Without a model, which may be what
            # is wrong already, more faults would only mislead.
            if not problems or "model" in made.engine:
                made.engine_config  # noqa: B018
        except ConfigError as error:
            problems += error.problems
        except BenchError as error:
            if not problems:
                raise
            problems.append(str(error))
        if problems:
            problems += unknown_tasks(evaluation, made.search_folders("include_path"))
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

    def explain(self, config: Config | None = None) -> dict[str, list[tuple[str, Any, str]]]:
        """Section -> rows of name as in YAML, resolved value and origin.

        ``config`` is the configuration of a started engine, which holds what the engine measured.
        """
        infos = settings_of(*ENGINE_SECTIONS)
        engine = [
            (infos[row.name].file_name, self.model_label if row.name == "model" else row.value, row.origin)
            for row in (config or self.engine_config).explain()
        ]
        evaluation = [
            (name, value, self.eval_origins.get(name, DEFAULT)) for name, value in self.eval.as_dict().items()
        ]
        return {"engine": engine, "eval": evaluation}

    def as_document(self, config: Config | None = None) -> dict[str, dict[str, Any]]:
        """``engine``, ``eval`` and ``origins`` as plain data; read as a file it gives the same run.

        ``config`` as for `explain`.
        """
        rows = self.explain(config)
        document: dict[str, dict[str, Any]] = {
            section: {name: plain(value) for name, value, _ in rows[section]} for section in rows
        }
        for name in ("dataset_data_files", "include_path"):
            value = document["eval"][name]
            if value:
                found = [folder / value for folder in self.search_folders(name) if (folder / value).exists()]
                document["eval"][name] = str(found[0]) if found else value
        document[ORIGINS] = origins_section(rows, BENCH_SECTIONS)
        return document


def _without_derived(file: YamlFile) -> YamlFile:
    return without_derived(file, BENCH_SECTIONS)


def _with_hint(problem: str) -> str:
    return problem + LIMIT_HINT if "dataset_limit must be" in problem else problem
