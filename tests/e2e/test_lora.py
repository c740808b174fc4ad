"""An engine with an adapter: the settings, the tokens beside and merged, and two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diffulex.config import Config, ConfigError
from diffulex.utils.adapter_files import AdapterError
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_random_sdar
from tests.support.real_engines import PROMPTS, essence, make_engine, run_all

if TYPE_CHECKING:
    from pathlib import Path

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_sdar(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), model, ALL, rank=4)


def decode(model: Path, **settings: Any) -> list[tuple[list[int], str, int]]:
    return [essence(output) for output in run_all(model, PROMPTS, **settings)]


def test_beside_and_merged_decode_the_same_tokens_and_the_base_others(model: Path, adapter: Path) -> None:
    beside = decode(model, use_lora=True, lora_path=str(adapter))
    assert beside == decode(model, use_lora=True, lora_path=str(adapter), pre_merge_lora=True)
    assert beside != decode(model)


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_with_an_adapter_decode_like_one(merge: bool, model: Path, adapter: Path) -> None:
    settings = {"use_lora": True, "lora_path": str(adapter), "pre_merge_lora": merge}
    one, two = (decode(model, tensor_parallel_size=size, **settings) for size in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"use_lora": True}, "lora_path must be the folder of the adapter when use_lora is True"),
        (
            {"use_lora": True, "lora_path": "no/where"},
            "lora_path must be the folder of an adapter, 'no/where'",
        ),
        ({"lora_path": "x"}, "lora_path='x' has no effect without use_lora=True"),
        ({"pre_merge_lora": True}, "pre_merge_lora=True has no effect without use_lora=True"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(
    settings: dict[str, Any], text: str, model: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(model=str(model), model_name="sdar", **settings)
    assert text in str(caught.value)


def test_an_adapter_of_another_kind_is_refused_with_the_settings(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, model, use_dora=True, modules_to_save=["lm_head"])
    with pytest.raises(ConfigError) as caught:
        Config(model=str(model), model_name="sdar", use_lora=True, lora_path=str(folder), block_size=5)
    text = str(caught.value)
    assert "use_dora must be absent" in text
    assert "modules_to_save must be absent" in text
    assert "block_size must be one of" in text


def test_an_adapter_of_another_base_ends_the_start_of_the_engine(model: Path, tmp_path: Path) -> None:
    other = write_random_sdar(tmp_path / "other", hidden_size=32)
    adapter = write_adapter(tmp_path / "adapter", other)
    for size in (1, 2):
        with pytest.raises(AdapterError, match="does not fit the model"):
            make_engine(model, use_lora=True, lora_path=str(adapter), tensor_parallel_size=size)
