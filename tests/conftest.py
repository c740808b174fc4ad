"""Options and settings of the whole test-suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Small tensors: threads cost more than they bring, and two workers may share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("short", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=1000, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long random runs too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long_run = config.getoption("--long")
    for item in items:
        if "gpu" in item.keywords:
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))
        if "long" in item.keywords and not long_run:
            item.add_marker(pytest.mark.skip(reason="long run, selected with --long"))
