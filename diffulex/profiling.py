"""Profiling: the options of `profiler_config`, and `Profiler`, which writes traces of engine steps.

torch is imported only when a profiler starts.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from diffulex.logger import get_logger
from diffulex.settings.spec import ConfigError, check_value, setting, settings_of, unknown_name

if TYPE_CHECKING:
    import torch

__all__ = ["Profiler", "ProfilerSettings"]

logger = get_logger(__name__)

DEFAULT_FOLDER = "profiles"
SCHEDULE_KEYS = ("skip_first", "wait", "warmup", "active", "repeat")


@dataclass(frozen=True)
class ProfilerSettings:
    """Options of one profiling session; `from_mapping` checks them."""

    profiler: str = setting("torch", help="Profiler in use.", choices=("torch",))
    torch_profiler_dir: str = setting(
        DEFAULT_FOLDER, help="Folder of the trace files; must be written when profiler is."
    )
    activities: tuple[str, ...] = setting(("cpu",), help="What is recorded.", choices=("cpu", "cuda"))
    use_cuda: bool = setting(False, help="Record CUDA too.")
    schedule: Mapping[str, object] | None = setting(
        None, help="Steps to skip_first, wait, warmup, active and repeat; null records without pause."
    )
    delay_iterations: int = setting(0, help="Engine steps before recording starts.", low=0)
    max_iterations: int = setting(0, help="Engine steps recorded; 0 records to the end.", low=0)
    record_shapes: bool = setting(False, help="Record the shapes of operands.")
    profile_memory: bool = setting(False, help="Record memory use.")
    with_stack: bool = setting(False, help="Record source lines.")
    with_modules: bool = setting(False, help="Record module names.")
    run_id: str = setting("", help="Beginning of the trace files' names.")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """The options in plain form.

        Raises:
            ConfigError: an option is unknown or cannot be used; all of them are listed.
        """
        infos = settings_of(cls)
        problems: list[str] = []
        values: dict[str, Any] = {}
        for name, value in options.items():
            if name not in infos:
                problems.append(f"profiler_config: {unknown_name(str(name), list(infos))}")
                continue
            values[name], wrong = check_value(infos[name], value)
            if wrong is not None:
                problems.append(f"profiler_config: {wrong}")
        problems += [f"profiler_config: {text}" for text in _broken_rules(values)] if not problems else []
        if problems:
            raise ConfigError(problems)
        return cls(**values)

    @property
    def wants_cuda(self) -> bool:
        """True when CUDA is to be recorded."""
        return self.use_cuda or "cuda" in self.activities


def _broken_rules(values: Mapping[str, Any]) -> list[str]:
    broken = []
    if "profiler" in values and not values.get("torch_profiler_dir"):
        broken.append("torch_profiler_dir must be a folder when profiler is written; add it")
    if values.get("activities") == ():
        broken.append("activities must name cpu or cuda or both, got none")
    schedule = values.get("schedule")
    if schedule is None:
        return broken
    for key, steps in schedule.items():
        low = 1 if key == "active" else 0
        if key not in SCHEDULE_KEYS:
            broken.append(f"schedule: {unknown_name(str(key), SCHEDULE_KEYS)}")
        elif isinstance(steps, bool) or not isinstance(steps, int) or steps < low:
            broken.append(f"schedule: {key} must be a whole number of at least {low}, got {steps!r}")
    if "active" not in schedule:
        broken.append("schedule must say how many steps are active; add active")
    broken += [
        f"{name} has no effect beside schedule; use skip_first or active there"
        for name in ("delay_iterations", "max_iterations")
        if values.get(name)
    ]
    return broken


class Profiler:
    """Records engine steps; without options it does nothing and costs nothing.

    The engine of each process makes one, calls `start`, `step` after every engine step, and `stop`.

    Args:
        options: `profiler_config`, or None.
        rank: Number of this process, part of the file names.
    """

    def __init__(self, options: Mapping[str, Any] | ProfilerSettings | None, rank: int = 0) -> None:
        if options is not None and not isinstance(options, ProfilerSettings):
            options = ProfilerSettings.from_mapping(options)
        self.settings: ProfilerSettings | None = options
        self.rank = rank
        self.trace_files: list[Path] = []
        self._running: torch.profiler.profile | None = None
        self._steps_left_to_wait = 0
        self._num_recorded = 0
        self._started = False

    @property
    def is_active(self) -> bool:
        """True while steps are recorded."""
        return self._running is not None

    def start(self) -> None:
        """Recording begins, at once or after the steps that the options let pass."""
        if self.settings is None or self._started:
            return
        self._started = True
        self._steps_left_to_wait = self.settings.delay_iterations
        if self._steps_left_to_wait == 0:
            self._begin(self.settings)

    def step(self) -> None:
        """One engine step is over."""
        if self.settings is None or not self._started:
            return
        if self._running is not None:
            self._running.step()
            self._num_recorded += 1
            if self._num_recorded == self.settings.max_iterations:
                self._end()
        elif self._steps_left_to_wait > 0:
            self._steps_left_to_wait -= 1
            if self._steps_left_to_wait == 0:
                self._begin(self.settings)

    def stop(self) -> None:
        """Recording is over and all traces are written; calling it again changes nothing."""
        self._end()
        self._started = False

    def span(self, name: str) -> AbstractContextManager[object]:
        """A context whose duration shows under `name` in the trace."""
        if self._running is None:
            return nullcontext()
        import torch

        return torch.profiler.record_function(name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin(self, settings: ProfilerSettings) -> None:
        import torch

        kinds = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        names = dict.fromkeys((*settings.activities, *(("cuda",) if settings.use_cuda else ())))
        schedule = None
        if settings.schedule is not None:
            steps: dict[str, Any] = {"wait": 0, "warmup": 0, **settings.schedule}
            schedule = torch.profiler.schedule(**steps)
        self._running = torch.profiler.profile(
            activities=[kinds[name] for name in names],
            schedule=schedule,
            on_trace_ready=self._write,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            with_modules=settings.with_modules,
        )
        self._running.start()

    def _end(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()

    def _write(self, finished: "torch.profiler.profile") -> None:
        assert self.settings is not None
        folder = Path(self.settings.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{self.settings.run_id}_" if self.settings.run_id else ""
        path = folder / f"{prefix}rank{self.rank}_{len(self.trace_files)}.json"
        finished.export_chrome_trace(str(path))
        self.trace_files.append(path)
        logger.info("wrote the trace %s", path)
