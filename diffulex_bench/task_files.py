"""Find task and configuration files: bundled folders, the user's folder, what a task needs. No lm-eval here.

The folders ``tasks/`` and ``configs/`` stand beside the package in a checkout and inside it, as ``_tasks``
and ``_configs``, in an installed wheel.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from diffulex.utils.registry import did_you_mean
from diffulex_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex_bench.config import EvalSettings


def bundled_folder(name: str) -> Path:
    """The folder ``name`` (``tasks`` or ``configs``) of the wheel, otherwise of the checkout."""
    package = Path(__file__).parent
    in_wheel = package / f"_{name}"
    return in_wheel if in_wheel.is_dir() else package.parent / name


def find_config(name: str) -> Path:
    """The YAML file ``name``: a path, or the name of a bundled configuration with or without ``.yaml``.

    Raises:
        BenchError: there is no such file.
    """
    given = Path(name)
    if given.is_file():
        return given
    bundled = bundled_folder("configs")
    for candidate in (bundled / given.name, bundled / f"{given.name}.yaml"):
        if candidate.is_file() and len(given.parts) == 1 + (given.parts[0] == "configs"):
            return candidate
    known = ", ".join(sorted(path.stem for path in bundled.glob("*.yaml")))
    raise BenchError(f"there is no configuration file {name}; give a path or a bundled name ({known})")


def find_user_path(value: str, setting: str, folders: Sequence[Path]) -> Path:
    """The existing path ``value``: absolute, or relative to the first of ``folders`` that holds it.

    Raises:
        BenchError: it exists nowhere; the message lists the places that were tried.
    """
    given = Path(value).expanduser()
    tried = list(dict.fromkeys((folder / given).absolute() for folder in folders))
    for candidate in tried:
        if candidate.exists():
            return candidate
    raise BenchError(f"{setting} names {value}, which does not exist (tried {', '.join(map(str, tried))})")


def include_folders(include_path: str | None, folders: Sequence[Path]) -> list[Path]:
    """Folders to look for tasks in, the later one winning: bundled, then the user's.

    None means the bundled folder alone, an empty string none at all.
    """
    if include_path == "":
        return []
    bundled = bundled_folder("tasks")
    if include_path is None:
        return [bundled]
    own = find_user_path(include_path, "include_path", folders)
    if not own.is_dir():
        raise BenchError(f"include_path names {own}, which is no folder; give the folder of the task YAMLs")
    return [bundled, own]


def scan_tasks(folder: Path) -> tuple[dict[str, Path], dict[Path, str]]:
    """Name -> file of every task YAML below ``folder``, and file -> reason of those that do not parse."""
    found: dict[str, Path] = {}
    broken: dict[Path, str] = {}
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            name = read_task_yaml(path).get("task")
        except (yaml.YAMLError, OSError, UnicodeDecodeError, BenchError) as error:
            broken[path] = " ".join(str(error).split())
            continue
        if isinstance(name, str):
            found.setdefault(name, path)
    return found, broken


def search_names(folder: Path, wanted: Sequence[str]) -> tuple[set[str], set[str]]:
    """Which of ``wanted`` occur anywhere in the YAML files below ``folder``, and names that look like tasks.

    A search of the text, ten times as fast as parsing thousands of files; enough to say that a name is
    unknown.
    """
    mentioned: set[str] = set()
    names: set[str] = set()
    for path in folder.glob("**/*.yaml"):
        text = path.read_text(encoding="utf-8", errors="replace")
        mentioned.update(name for name in wanted if name in text)
        names.update(_NAME_LINE.findall(text))
    return mentioned, names


def read_task_yaml(path: Path) -> dict[str, Any]:
    """The keys of a task YAML and of the files it includes, functions left as text; local keys win."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_TaskLoader)  # builds plain data
    if not isinstance(content, dict):
        raise BenchError(f"{path} holds no mapping; a task file is a mapping of keys to values")
    merged: dict[str, Any] = {}
    includes = content.pop("include", [])
    for include in includes if isinstance(includes, list) else [includes]:
        merged.update(read_task_yaml(path.parent / str(include)))
    return merged | content


def unknown_tasks(settings: EvalSettings, folders: Sequence[Path]) -> list[str]:
    """A sentence for every task name that occurs in no task file; a folder that is missing is one too.

    A search of the text without loading lm-eval, for a run that cannot start anyway.
    """
    try:
        places = include_folders(settings.include_path, folders)
    except BenchError as error:
        return [str(error)]
    library = importlib.util.find_spec("lm_eval")
    places += [Path(one) / "tasks" for one in (library.submodule_search_locations or [] if library else [])]
    missing = [name for name in settings.task_names if not Path(name).is_file()]
    known: set[str] = set()
    for place in places:
        if missing:
            found, names = search_names(place, missing)
            missing, known = [name for name in missing if name not in found], known | names
    return [f"there is no task {name!r}{did_you_mean(name, sorted(known))}" for name in missing]


def needs_hub(settings: EvalSettings, folders: Sequence[Path]) -> bool:
    """True unless every task is known to take its data from a local file or from a function of its own."""
    if settings.dataset_data_files is not None:
        return False
    known: dict[str, Path] = {}
    for folder in folders:
        known |= scan_tasks(folder)[0]
    names = settings.task_names
    return not all(name in known and "custom_dataset" in read_task_yaml(known[name]) for name in names)


#: ``task: name``, ``group: name``, ``tag: name`` and items of lists of names.
_NAME_LINE = re.compile(
    r"^\s*(?:- )?(?:(?:task|group|tag)\s*:\s*|- )[\"']?([\w.+-]+)[\"']?\s*$", re.MULTILINE
)


class _TaskLoader(yaml.SafeLoader):
    """Reads ``!function name`` as the text ``name``."""


def _function_name(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_TaskLoader.add_constructor("!function", _function_name)
