"""What the files of a checkpoint decide about a configuration."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.config import Config
from diffulex.settings.checkpoint_rules import apply_checkpoint
from tests.support.configs import (
    EOS_ID,
    MASK_ID,
    MAX_POSITION,
    VOCAB_SIZE,
    make_checkpoint,
    make_config,
    make_draft,
)
from tests.unit.test_config import refused

if TYPE_CHECKING:
    from pathlib import Path


def test_its_facts_are_attributes(checkpoint: Path) -> None:
    config = make_config(checkpoint)
    assert config.mask_token_id == MASK_ID
    assert config.eos_token_ids == (EOS_ID,)
    assert config.vocab_limit == VOCAB_SIZE
    assert config.hf_config["num_attention_heads"] == 4
    assert config.checkpoint.path == checkpoint


def test_the_longest_sequence_is_lowered_to_what_it_can_take(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(checkpoint, max_model_len=1024)
    assert config.max_model_len == MAX_POSITION
    assert "max_model_len 1024 is lowered to 512" in caplog.text
    assert make_config(checkpoint, max_model_len=100).max_model_len == 100


def test_the_token_budget_is_compared_with_the_lowered_length(checkpoint: Path) -> None:
    assert make_config(checkpoint, max_model_len=4096, max_num_batched_tokens=512).max_model_len == 512
    assert refused(checkpoint, max_num_batched_tokens=511) == (
        "max_num_batched_tokens (511) must be at least max_model_len (512); raise it or lower max_model_len",
    )


def test_a_written_mask_id_wins_with_a_warning_when_the_files_say_otherwise(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_config(checkpoint, mask_token_id=4).mask_token_id == 4
    assert "mask_token_id=4 is used although" in caplog.text
    caplog.clear()
    make_config(checkpoint, mask_token_id=MASK_ID)
    assert "mask_token_id" not in caplog.text


def test_a_mask_id_outside_the_vocabulary_is_refused(checkpoint: Path) -> None:
    (problem,) = refused(checkpoint, mask_token_id=151666)
    assert problem.startswith("mask_token_id (151666) must be below the 16 ids of")


def test_a_checkpoint_that_names_no_mask_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, mask_token=None, mask_token_id=None, model_type="other")
    (problem,) = refused(folder)
    assert problem.startswith("mask_token_id stands nowhere in")
    assert make_config(folder, mask_token_id=3).mask_token_id == 3


def test_a_missing_folder_is_reported_beside_other_faults(tmp_path: Path) -> None:
    problems = refused(tmp_path / "none", block_size=5)
    assert len(problems) == 2
    assert problems[0].startswith("block_size must be one of")
    assert "none' does not exist" in problems[1]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    (problem,) = refused(folder)
    assert "tokenizer" in problem


def test_a_tokenizer_folder_of_its_own_is_read(tmp_path: Path, checkpoint: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    config = make_config(folder, tokenizer_path=str(checkpoint))
    assert config.checkpoint.tokenizer_path == checkpoint


@pytest.mark.parametrize(
    ("stated", "block", "origin"),
    [
        ({"block_size": 16}, 16, "checkpoint (config.json: block_size)"),
        ({"bd_size": 8}, 8, "checkpoint (config.json: bd_size)"),
        ({}, 4, "checkpoint (fallback of model_type sdar)"),
    ],
)
def test_an_unset_block_size_is_the_trained_one(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stated: dict[str, Any],
    block: int,
    origin: str,
) -> None:
    caplog.set_level(logging.INFO, logger="diffulex")
    config = make_config(make_checkpoint(tmp_path, **stated))
    assert (config.block_size, config.origins["block_size"]) == (block, origin)
    assert "block_size" not in config.explicit
    assert "trained" not in caplog.text
    assert dataclasses.replace(config) == config
    assert Config(**config.as_dict()) == config


def test_a_written_block_size_wins_with_one_line_when_training_used_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="diffulex")
    folder = make_checkpoint(tmp_path, block_size=16)
    assert make_config(folder, block_size=32).block_size == 32
    (line,) = [record for record in caplog.records if "trained" in record.getMessage()]
    assert line.levelno == logging.INFO
    assert line.getMessage() == f"block_size=32 is used although {folder} was trained with 16"
    caplog.clear()
    assert make_config(folder, block_size=16).block_size == 16
    assert "trained" not in caplog.text


def test_a_trained_block_that_cannot_run_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, block_size=64)
    assert make_config(folder).block_size == 32
    assert "was trained with 64, which is none of 4, 8, 16, 32; write one of them" in caplog.text
    assert make_config(make_checkpoint(tmp_path / "256", block_size=256)).block_size == 32


def test_a_strategy_of_a_program_takes_the_trained_block_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffulex.settings.resolve.registered_strategies", lambda: ("my_strategy",))
    folder = make_checkpoint(tmp_path, block_size=16)
    assert make_config(folder, decoding_strategy="my_strategy").block_size == 16


def test_a_page_is_compared_with_the_trained_block_and_not_with_the_default(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, block_size=8)
    assert make_config(folder, page_size=8).block_size == 8
    assert refused(folder, page_size=4) == (
        "block_size (8) must not exceed page_size (4); raise page_size or lower block_size",
    )


def test_a_fallback_mask_id_that_the_tokenizer_does_not_know_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent: dict[str, Any] = {"mask_token": None, "mask_token_id": None, "vocab_size": 151_936}
    folder = make_checkpoint(tmp_path, **absent)
    assert make_config(folder).mask_token_id == 151_669
    (line,) = [record.getMessage() for record in caplog.records if "mask_token_id" in record.getMessage()]
    assert line == (
        "mask_token_id is 151669, the fallback of model_type sdar, although the tokenizer of "
        f"{folder} knows only 12 ids; write mask_token_id if it is another"
    )
    caplog.clear()
    make_config(folder, mask_token_id=151_669)
    assert "mask_token_id" not in caplog.text


def test_a_written_pool_too_small_for_a_request_of_full_length_is_warned_about(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(checkpoint, max_model_len=100, page_size=8, block_size=4, num_pages=12)
    assert config.num_pages == 12
    (line,) = [record.getMessage() for record in caplog.records if "num_pages" in record.getMessage()]
    assert line.startswith(
        "num_pages=12 cannot hold one request of max_model_len 100, which takes 13 pages of 8 tokens"
    )
    caplog.clear()
    make_config(checkpoint, max_model_len=100, page_size=8, block_size=4, num_pages=13)
    make_config(checkpoint, max_model_len=100, page_size=8, block_size=4)
    assert "num_pages" not in caplog.text


def test_b35_ranks_that_do_not_divide_the_heads_are_refused_by_name(checkpoint: Path) -> None:
    problems = refused(checkpoint, tensor_parallel_size=3)
    assert any("must divide the 4 attention heads" in problem for problem in problems)


def test_b35_ranks_that_do_not_divide_the_kv_heads_are_refused_by_name(checkpoint: Path) -> None:
    assert make_config(checkpoint, tensor_parallel_size=2).tensor_parallel_size == 2
    (problem,) = refused(checkpoint, tensor_parallel_size=4)
    assert "the 2 KV heads" in problem


def test_b35_head_counts_of_other_names_are_read_too(tmp_path: Path) -> None:
    names = {"num_attention_heads": None, "num_key_value_heads": None, "n_heads": 5, "n_kv_heads": 1}
    problems = refused(make_checkpoint(tmp_path, **names), tensor_parallel_size=2)
    assert any("must divide the 5 attention heads" in problem for problem in problems)


def test_an_unset_page_grows_with_the_trained_block(tmp_path: Path) -> None:
    draft = make_draft(
        model=str(make_checkpoint(tmp_path, block_size=256)),
        model_name="diffusion_gemma",
        decoding_strategy="of_somebody_else",
    )
    apply_checkpoint(draft)
    assert not draft.problems
    assert (draft.values["block_size"], draft.values["page_size"]) == (256, 256)
    assert draft.origins["page_size"] == "raised to block_size, checkpoint (config.json: block_size)"


def test_a_strategy_with_blocks_of_its_own_keeps_them(tmp_path: Path) -> None:
    draft = make_draft(
        model=str(make_checkpoint(tmp_path, bd_size=16)),
        model_name="fast_dllm_v2",
        decoding_strategy="fast_dllm_v2",
    )
    apply_checkpoint(draft)
    assert draft.values["block_size"] == 32


def test_sizes_that_an_unreadable_folder_would_decide_are_not_judged(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "none", page_size=8)
    assert "none' does not exist" in problem
    assert len(refused(tmp_path / "none", page_size=8, block_size=16)) == 2
