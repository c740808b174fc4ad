"""Where a result comes from: versions, device, threads, checkpoint, commit; no host name, no user."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config import Config

_PACKAGES = (
    "diffulex", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "vllm",
    "lm-eval", "datasets", "reasoning-gym",
)  # fmt: skip
_GIT_SECONDS = 10.0


@dataclass(frozen=True)
class Environment:
    """The surroundings of a run.

    Attributes:
        time: start of the run, ISO 8601 with offset.
        command: the command line.
        packages: versions; None for a package that is not installed.
        commit: git commit of the project's checkout, with ``-dirty`` for local changes; None outside one.
        device: name of the device, dtype and thread counts included in `compute`.
        compute: device, dtype, torch threads, CPUs that the process may use, CUDA version.
        seeds: ``engine`` and ``eval`` base seeds.
        checkpoint: hash of config.json, names and sizes of the weight files.
    """

    time: str
    command: list[str]
    python: str
    platform: str
    packages: dict[str, str | None]
    commit: str | None
    compute: dict[str, Any]
    seeds: dict[str, int]
    checkpoint: dict[str, Any]


def describe_environment(config: Config, eval_seed: int, command: Sequence[str]) -> Environment:
    """The environment of a run of ``config``; imports torch."""
    return Environment(
        time=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        command=list(command),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        commit=commit_of(Path(__file__).parent.parent),
        compute=_compute(config),
        seeds={"engine": config.seed, "eval": eval_seed},
        checkpoint=_checkpoint(config),
    )


def commit_of(folder: Path) -> str | None:
    """Commit of the git checkout at ``folder``, ``-dirty`` appended for changes; None without one."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # fixed arguments
            ["git", "-C", os.fspath(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute(config: Config) -> dict[str, Any]:
    import torch

    from diffulex.utils.device import device_facts, resolve_device, resolve_dtype

    device = resolve_device(config)
    facts = device_facts()
    return {
        "device": device.type,
        "device_name": facts.names[device.index or 0]
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "dtype": str(resolve_dtype(config, config.checkpoint.torch_dtype)).removeprefix("torch."),
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "usable_cpus": _usable_cpus(),
        "cuda": torch.version.cuda,
    }


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _checkpoint(config: Config) -> dict[str, Any]:
    facts = config.checkpoint
    return {
        "path": os.fspath(facts.path),
        "config_sha256": hashlib.sha256((facts.path / "config.json").read_bytes()).hexdigest(),
        "weight_files": {path.name: path.stat().st_size for path in facts.weight_files},
    }
