"""Puts the parts of an engine together: checks that the model fits the settings, starts the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.attention.cache_layout import DistinctLayout
from diffulex.distributed.launch import close_meeting_place, open_meeting_place
from diffulex.engine.model_runner import AutoModelRunner, MultiBlockModelRunnerTemplate
from diffulex.engine.scheduler import AutoScheduler, MultiBlockSchedulerTemplate
from diffulex.engine.worker import Workers
from diffulex.model.loader import check_division, outline

if TYPE_CHECKING:
    from diffulex.config import Config


def make_runner(config: Config) -> MultiBlockModelRunnerTemplate:
    """The runner of rank 0 with its model loaded; with tensor parallelism the other ranks run too.

    Raises:
        ConfigError: the model cannot be divided or laid out as the settings say; nothing was started.
        CheckpointError: the weights cannot be used.
        WorkerError: another rank failed.
    """
    runner_class = AutoModelRunner.get(config.decoding_strategy)
    if not issubclass(runner_class, MultiBlockModelRunnerTemplate):
        raise TypeError(f"{runner_class.__name__} is no MultiBlockModelRunnerTemplate")
    if config.kv_cache_layout == DistinctLayout.name:
        layout = DistinctLayout(config.k_cache_hdim_split_factor_x)
        for layer in outline(config).attention_layers():
            layout.check(layer.kv_shape)
    if config.tensor_parallel_size == 1:
        return runner_class(config, 0, [])
    check_division(config, config.tensor_parallel_size)
    config = config.resolved(master_port=open_meeting_place(config))
    try:
        workers = Workers(config, runner_class.__module__)
    except BaseException:
        close_meeting_place()
        raise
    try:
        workers.wait_until_joining()
        runner = runner_class(config, 0, workers.event)
    except BaseException as error:
        failure = workers.failure(error) if isinstance(error, RuntimeError) else error
        workers.stop()
        close_meeting_place()
        raise failure from error
    runner.workers = workers
    return runner


def make_scheduler(config: Config) -> MultiBlockSchedulerTemplate:
    """The scheduler of the strategy."""
    scheduler = AutoScheduler.get(config.decoding_strategy)(config)
    if not isinstance(scheduler, MultiBlockSchedulerTemplate):
        raise TypeError(f"{type(scheduler).__name__} is no MultiBlockSchedulerTemplate")
    return scheduler
