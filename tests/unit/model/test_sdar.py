from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.model.catalog import AutoModel, family_of
from diffulex.model.decoder import DecoderConfig, DiffusionLM
from diffulex.model.sdar import SdarLM
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.utils.checkpoint import CheckpointError, read_checkpoint
from tests.support.checkpoints import write_random_sdar

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, *names: str, **changes: Any) -> DecoderConfig:
    """The configuration after changes to config.json; `...` removes a key."""
    if not folder.exists():
        write_random_sdar(folder, 40, mask_id=3, eos_ids=(5,))
    content = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return SdarLM.read_config(read_checkpoint(folder), names)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder, **changes)
    return str(caught.value)


def test_the_whole_configuration_is_read(tmp_path: Path) -> None:
    assert read(tmp_path / "m", rms_norm_eps=1e-5, rope_theta=1000000) == DecoderConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        qk_norm=True,
    )


def test_absent_keys_take_what_the_published_class_assumes(tmp_path: Path) -> None:
    keys = ("head_dim", "rope_theta", "rms_norm_eps", "attention_bias", "tie_word_embeddings")
    config = read(tmp_path / "m", **dict.fromkeys(keys, ...))
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps) == (128, 10000.0, 1e-6)
    assert (config.qkv_bias, config.tie_word_embeddings) == (False, False)


def test_attention_bias_means_all_four_projections(tmp_path: Path) -> None:
    config = read(tmp_path / "m", attention_bias=True)
    assert (config.qkv_bias, config.output_bias) == (True, True)


def test_tying_holds_only_without_a_head_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    assert read(folder, tie_word_embeddings=True).tie_word_embeddings
    assert not read(folder, "lm_head.weight").tie_word_embeddings


@pytest.mark.parametrize(
    "parameters", [{"rope_theta": 5000.0, "rope_type": "default"}, {"rope_theta": 5000, "type": "default"}]
)
def test_the_newer_spelling_of_rope_is_read(tmp_path: Path, parameters: dict[str, Any]) -> None:
    assert read(tmp_path / "m", rope_theta=..., rope_parameters=parameters).rope_theta == 5000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
        {"rope_scaling": "dynamic"},
    ],
)
def test_scaled_rope_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "rope_scaling must be absent" in refusal(tmp_path / "m", **changes)


def test_training_keys_are_ignored(tmp_path: Path) -> None:
    plain = read(tmp_path / "m")
    extra = {
        "fuse_cross_entropy": True,
        "use_deepep": False,
        "ep_size": 1,
        "max_window_layers": 2,
        "sliding_window": None,
    }
    assert read(tmp_path / "m", **extra) == plain


def test_everything_wrong_with_a_config_is_listed_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path / "m",
        hidden_size=...,
        num_hidden_layers=0,
        num_key_value_heads=True,
        intermediate_size=2.5,
        head_dim=7,
        rms_norm_eps="small",
        rope_theta=-1,
        tie_word_embeddings="no",
        hidden_act="gelu",
        use_sliding_window=True,
    )
    assert str(tmp_path / "m" / "config.json") in message
    for part in (
        "hidden_size must be a positive whole number, it is absent",
        "num_hidden_layers must be a positive whole number, it is 0",
        "num_key_value_heads must be a positive whole number, it is True",
        "intermediate_size must be a positive whole number, it is 2.5",
        "head_dim must be even, it is 7",
        "rms_norm_eps must be a positive number, it is 'small'",
        "rope_theta must be a positive number, it is -1",
        "tie_word_embeddings must be true or false, it is 'no'",
        "hidden_act must be 'silu', it is 'gelu'",
        "use_sliding_window must be False, it is True",
    ):
        assert part in message


def test_query_heads_must_be_a_multiple_of_key_heads(tmp_path: Path) -> None:
    message = refusal(tmp_path / "m", num_attention_heads=4, num_key_value_heads=3)
    assert "num_attention_heads (4) must be a multiple of num_key_value_heads (3)" in message


def test_a_bias_flag_that_is_no_flag_is_refused(tmp_path: Path) -> None:
    assert "attention_bias must be true or false" in refusal(tmp_path / "m", attention_bias=1)


def test_every_name_of_the_catalog_is_a_family_with_defaults() -> None:
    for name in AutoModel.names():
        family = AutoModel.get(name)
        assert issubclass(family, DiffusionLM)
        assert family.model_types or family.architectures
        assert name in MODEL_DEFAULTS


def test_the_family_of_a_checkpoint_is_looked_up_by_model_name(tmp_path: Path) -> None:
    folder = write_random_sdar(tmp_path / "m", 40, mask_id=3, eos_ids=(5,))
    assert family_of("sdar", read_checkpoint(folder)) is SdarLM
