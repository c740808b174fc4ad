"""Load the tasks of a run through lm-eval, before any model, so that faulty ones cost no model load.

lm-eval's own task tree is only parsed when a name is unknown to the bundled and the user's folder, since
that takes seconds.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Kind

from diffulex.logger import get_logger
from diffulex_bench.errors import BenchError
from diffulex_bench.generation import plan_generation
from diffulex_bench.scoring import grader_of
from diffulex_bench.task_data import hub_source, local_source, missing_field, missing_split
from diffulex_bench.task_files import find_user_path, include_folders, scan_tasks, search_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex_bench.config import BenchConfig, EvalSettings
    from diffulex_bench.scoring import Grade

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadedTasks:
    """The tasks of a run, ready for ``simple_evaluate``.

    Attributes:
        manager: lm-eval's task manager that made them.
        specs: what was asked for, as task and group objects.
        tasks: task name -> lm-eval task.
        graders: task name -> our own grader, None where lm-eval scores.
    """

    manager: TaskManager
    specs: list[Any]
    tasks: dict[str, Any]
    graders: dict[str, Callable[[Mapping[str, Any], str], Grade] | None] = field(default_factory=dict)

    def num_requests(self, limit: int | None) -> int:
        """Requests that will be sent, repeats included."""
        return sum(
            min(len(task.eval_docs), limit or len(task.eval_docs)) * int(task.config.repeats)
            for task in self.tasks.values()
        )


def load_tasks(bench: BenchConfig) -> LoadedTasks:
    """The tasks that ``eval.dataset_name`` names, with their data.

    Raises:
        BenchError: a name is unknown, a task cannot be run, or its data is missing.
    """
    settings = bench.eval
    folders = include_folders(settings.include_path, bench.search_folders("include_path"))
    rules = _TaskRules(bench)
    manager = _manager_for(settings.task_names, folders, rules)
    _tell_overridden(settings.task_names, folders)
    specs: list[Any] = []
    for name in settings.task_names:
        try:
            loaded = manager.load([name])
        except BenchError:
            raise
        except jinja2.UndefinedError as error:
            raise rules.missing_field(error) or _unloadable(name, error) from error
        except (ImportError, KeyError, ValueError, TypeError, OSError, AttributeError) as error:
            raise _unloadable(name, error) from error
        groups = loaded.get("groups", {})
        specs += [groups[name]] if name in groups else [*loaded["tasks"].values()]
    tasks = manager.load(specs)["tasks"]
    for name, task in tasks.items():
        plan_generation(settings, bench.explicit_eval, task.config.generation_kwargs or {}, f"task {name}")
    graders = {name: grader_of(task.config.process_results) for name, task in tasks.items()}
    return LoadedTasks(manager, specs, tasks, graders)


def _unloadable(name: str, error: Exception) -> BenchError:
    reason = f"{type(error).__name__}: {error}"
    return BenchError(f"task {name} cannot be loaded ({reason}); see its YAML file")


def _manager_for(names: Sequence[str], folders: Sequence[Path], rules: _TaskRules) -> TaskManager:
    manager = _manager(folders, rules, include_defaults=False)
    known = list(manager.all_tasks)
    unknown = _unknown(names, manager)
    if not unknown:
        return manager
    mentioned, foreign = search_names(Path(lm_eval.tasks.__file__).parent, unknown)
    if mentioned.issuperset(unknown):
        logger.info("reading lm-eval's own tasks, which takes some seconds")
        manager = _manager(folders, rules, include_defaults=True)
        unknown = _unknown(names, manager)
    if unknown:
        raise BenchError(_unknown_text(unknown[0], [*known, *sorted(foreign)], folders))
    return manager


def _manager(folders: Sequence[Path], rules: _TaskRules, *, include_defaults: bool) -> TaskManager:
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=include_defaults)
    manager._factory = _TaskFactory(rules)
    return manager


def _unknown(names: Sequence[str], manager: TaskManager) -> list[str]:
    return [name for name in names if name not in manager.task_index and not Path(name).is_file()]


def _unknown_text(name: str, known: Sequence[str], folders: Sequence[Path]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    broken = [f"{path}: {why}" for folder in folders for path, why in scan_tasks(folder)[1].items()]
    unread = f" Task files that could not be read: {'; '.join(broken)}." if broken else ""
    places = ", ".join(map(str, folders)) or "no folder"
    return f"there is no task {name!r} in {places} or lm-eval's own tasks{hint}{unread}"


def _tell_overridden(names: Sequence[str], folders: Sequence[Path]) -> None:
    if len(folders) < 2:
        return
    bundled, own = (scan_tasks(folder)[0] for folder in folders)
    for name in names:
        if name in bundled and name in own:
            logger.warning("task %s is taken from %s; it replaces the bundled one", name, own[name])


class _TaskFactory(TaskFactory):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval's factory, with our rules applied to a task's keys before the task is built."""

    def __init__(self, rules: _TaskRules) -> None:
        super().__init__()
        self._rules = rules

    def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        keys: dict[str, Any] = super()._load_full_config(entry, overrides)
        if entry.kind is Kind.TASK:
            folder = entry.yaml_path.parent if entry.yaml_path else None
            self._rules.apply(keys, folder)
        return keys


class _TaskRules:
    """What the bench demands of a task and changes in it; see `apply`."""

    def __init__(self, bench: BenchConfig) -> None:
        self._settings: EvalSettings = bench.eval
        self._explicit = bench.explicit_eval
        self._data_folders = bench.search_folders("dataset_data_files")
        self._told: set[str] = set()
        self._loaded: tuple[str, str, list[str]] | None = None

    def apply(self, keys: dict[str, Any], folder: Path | None) -> None:
        """Refuses what cannot be run, drops the stop string that lm-eval would add, and sets the data source.

        Raises:
            BenchError: the task needs log-likelihoods, images, sound, or unconfirmed code execution.
        """
        self._refuse(keys)
        kwargs = dict(keys.get("generation_kwargs") or {})
        if "until" not in kwargs:
            self._tell_until(keys)
            # Present and empty: lm-eval adds its few-shot delimiter only when the key is missing.
            keys["generation_kwargs"] = {**kwargs, "until": []}
        source = self._set_data(keys, folder)
        keys["custom_dataset"] = self._watched(
            keys["task"], keys["custom_dataset"], keys["test_split"], source
        )

    def missing_field(self, error: Exception) -> BenchError | None:
        """The error for a field that the task loaded last did not find; None when it is another one."""
        return missing_field(*self._loaded, error) if self._loaded else None

    def _watched(
        self, task: str, load: Callable[..., Mapping[str, Any]], split: str, source: str
    ) -> Callable[..., Mapping[str, Any]]:
        """``load``, after which it is known what the data of ``task`` hold."""
        self._loaded = None

        def load_watched(**kwargs: Any) -> Mapping[str, Any]:
            found = load(**kwargs)
            self._loaded = task, source, list(getattr(found.get(split), "column_names", None) or [])
            return found

        return load_watched

    def _refuse(self, keys: Mapping[str, Any]) -> None:
        task, output = keys["task"], keys.get("output_type", "generate_until")
        if output != "generate_until":
            raise BenchError(
                f"task {task} scores log-likelihoods ({output}), which are not supported: diffulex answers "
                "generate_until tasks only and never makes up a likelihood; choose a generative task"
            )
        if keys.get("doc_to_image") or keys.get("doc_to_audio"):
            raise BenchError(
                f"task {task} needs images or sound; diffulex reads text only, choose another task"
            )
        if keys.get("unsafe_code") and not self._settings.confirm_run_unsafe_code:
            raise BenchError(
                f"task {task} runs code that the model wrote; set confirm_run_unsafe_code to true to allow it"
            )

    def _tell_until(self, keys: Mapping[str, Any]) -> None:
        task = keys["task"]
        if task not in self._told:
            self._told.add(task)
            logger.warning(
                "task %s names no stop strings; lm-eval would add %r, here only the end of sequence stops",
                task,
                keys.get("fewshot_delimiter", "\n\n"),
            )

    def _set_data(self, keys: dict[str, Any], folder: Path | None) -> str:
        """Sets the split and ``custom_dataset``; returns what to call the place of the data."""
        settings = self._settings
        own_split = keys.get("test_split") or keys.get("validation_split")
        split = settings.dataset_split if "dataset_split" in self._explicit or not own_split else own_split
        keys["test_split"] = split
        if settings.dataset_data_files is not None:
            path = find_user_path(settings.dataset_data_files, "dataset_data_files", self._data_folders)
            for name in (
                "dataset_path",
                "dataset_name",
                "validation_split",
                "training_split",
                "fewshot_split",
            ):
                keys.pop(name, None)
            keys["dataset_kwargs"] = {}
            keys["custom_dataset"] = local_source(path, split)
            return str(path)
        if "custom_dataset" in keys:
            keys["custom_dataset"] = _with_split(keys["task"], keys["custom_dataset"], split)
            return f"the data of task {keys['task']}"
        wanted = (split, *(keys[name] for name in ("training_split", "fewshot_split") if keys.get(name)))
        kwargs = _absolute_data_files(dict(keys.get("dataset_kwargs") or {}), folder)
        kwargs.pop("trust_remote_code", None)
        source = str(keys.get("dataset_path")), keys.get("dataset_name")
        keys["custom_dataset"] = hub_source(keys["task"], *source, kwargs, tuple(dict.fromkeys(wanted)))
        keys["dataset_kwargs"] = {}
        return f"the data set {source[0]}"


def _with_split(
    task: str, load: Callable[..., Mapping[str, Any]], split: str
) -> Callable[..., Mapping[str, Any]]:
    """``load``, whose result must hold ``split``."""

    def load_checked(**kwargs: Any) -> Mapping[str, Any]:
        found = load(**kwargs)
        if split not in found:
            raise missing_split(task, split, found)
        return found

    return load_checked


def _absolute_data_files(kwargs: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """``data_files`` of a task YAML made absolute where they stand beside the YAML."""
    files = kwargs.get("data_files")
    if folder is None or not isinstance(files, str | dict):
        return kwargs

    def absolute(value: object) -> object:
        beside = folder / value if isinstance(value, str) else None
        return os.fspath(beside) if beside is not None and beside.exists() else value

    kwargs["data_files"] = (
        {split: absolute(value) for split, value in files.items()}
        if isinstance(files, dict)
        else absolute(files)
    )
    return kwargs
