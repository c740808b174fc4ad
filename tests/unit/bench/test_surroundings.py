import os
import socket

import pytest

from diffulex_bench import surroundings
from diffulex_bench.surroundings import OFFLINE_VARIABLES, leave_launcher, prepare_hub, quiet_libraries
from tests.support.bench_runs import clean_environment


def test_launcher_variables_are_removed():
    with clean_environment(LOCAL_RANK="3", WORLD_SIZE="8"):
        leave_launcher()
        assert "LOCAL_RANK" not in os.environ
        assert "WORLD_SIZE" not in os.environ


def test_without_need_for_the_hub_libraries_work_offline_unless_the_user_said_otherwise():
    with clean_environment(HF_HUB_OFFLINE="0"):
        prepare_hub(needed=False)
        assert {name: os.environ[name] for name in OFFLINE_VARIABLES} == {
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }


@pytest.mark.parametrize(("reachable", "offline"), [(True, False), (False, True)])
def test_hub_that_is_needed_is_used_when_it_answers(monkeypatch, reachable, offline):
    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def connect(address, timeout):
        assert address == ("huggingface.co", 443)
        if not reachable:
            raise OSError("no route")
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with clean_environment():
        prepare_hub(needed=True)
        assert ("HF_HUB_OFFLINE" in os.environ) is offline


def test_behind_a_proxy_the_hub_counts_as_reachable(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setattr(socket, "create_connection", None)
    assert surroundings._is_reachable()


def test_libraries_draw_no_bars():
    with clean_environment():
        quiet_libraries()
        assert os.environ["TQDM_DISABLE"] == "1"
