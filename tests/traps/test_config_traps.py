"""Faults of configuration that users reported; each test carries the number of its report."""

from __future__ import annotations

import json
import logging
import socket
from typing import TYPE_CHECKING

import pytest

from diffulex import Diffulex
from diffulex.config import Config, ConfigError
from diffulex.engine import model_runner
from tests.support.checkpoints import write_random_sdar
from tests.support.real_engines import PROMPTS, VOCAB, greedy, make_engine, run_all

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_sdar(tmp_path_factory.mktemp("net"), VOCAB)


# Mask token ----------------------------------------------------------------------------------------------


def without_mask(folder: Path, mask_id: int | None) -> Path:
    """A checkpoint whose tokenizer names no mask; config.json says `mask_id`."""
    write_random_sdar(folder, VOCAB)
    config = json.loads((folder / "config.json").read_text())
    config["mask_token_id"] = mask_id
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("mask_id", [None, VOCAB, 151666])
def test_b21_a_checkpoint_without_a_usable_mask_id_is_refused(tmp_path: Path, mask_id: int | None) -> None:
    folder = without_mask(tmp_path, mask_id)
    with pytest.raises(ConfigError, match="mask_token_id") as caught:
        make_engine(folder)
    message = str(caught.value)
    assert str(folder) in message
    for place in ("config.json", "special_tokens_map.json", "tokenizer_config.json"):
        assert place in message


def test_b21_a_written_mask_id_serves_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    folder = without_mask(tmp_path, None)
    outputs = run_all(folder, PROMPTS[:2], mask_token_id=0)
    assert all(0 not in output.full_token_ids for output in outputs)
    with pytest.raises(ConfigError, match=r"mask_token_id \(64\) must be below the 64 ids"):
        make_engine(folder, mask_token_id=64)


# Configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "allowed"),
    [
        ({"model_name": "llada", "decoding_strategy": "dmax"}, "d2f or multi_bd"),
        ({"model_name": "dream", "sampling_mode": "edit"}, "naive"),
        ({"model_name": "llada2_mini_dmax", "decoding_strategy": "dmax", "sampling_mode": "naive"}, "edit"),
    ],
)
def test_b31_settings_that_do_not_go_together_are_refused_with_both_names(
    net: Path, monkeypatch: pytest.MonkeyPatch, pair: dict[str, str], allowed: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(model_runner, "load_model", never)
    with pytest.raises(ConfigError) as caught:
        Diffulex(str(net), **pair)
    wrong = list(pair)[-1]
    line = next(line for line in str(caught.value).splitlines() if line.strip(" -").startswith(wrong))
    assert f"{wrong}={pair[wrong]!r}" in line
    assert f"model_name={pair['model_name']!r}" in line
    assert allowed in line


def test_b32_a_misspelt_keyword_is_ignored_with_one_warning_that_names_the_nearest(
    net: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="diffulex"), make_engine(net, accept_treshold=0.5) as engine:
        assert engine.config.accept_threshold == 0.6
    warnings = [record.getMessage() for record in caplog.records if "accept_treshold" in record.getMessage()]
    assert len(warnings) == 1
    assert "accept_threshold" in warnings[0].replace("accept_treshold", "")


def test_b36_one_device_needs_neither_a_port_nor_a_second_device(net: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 2333))
        holder.listen()
        with make_engine(net) as engine:
            assert engine.config.tensor_parallel_size == 1
            assert len(engine.generate([[5, 6]], greedy(3)).trajectories[0].token_ids) <= 3
    assert "tensor_parallel_size" not in Config(model=str(net), model_name="sdar").explicit
