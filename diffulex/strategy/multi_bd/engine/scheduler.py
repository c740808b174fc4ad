"""Scheduler of `multi_bd`."""

from diffulex.engine.scheduler import AutoScheduler, MultiBlockSchedulerTemplate


@AutoScheduler.register("multi_bd")
class MultiBDScheduler(MultiBlockSchedulerTemplate):
    """The template's own rules."""
