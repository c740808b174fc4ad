"""The mask id and the trained block of each family, with what its published files say and leave out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diffulex.utils.checkpoint import CheckpointFacts, read_checkpoint
from tests.support.checkpoints import write_stub

if TYPE_CHECKING:
    from pathlib import Path

# Rows that the published checkpoints have.
ROWS = {"DreamModel": 152064, "DreamForCausalLM": 151936, "Fast_dLLM_QwenForCausalLM": 152064,
        "LLaDAModelLM": 126464, "StableDiffcoderForCausalLM": 155136}  # fmt: skip
MODEL_TYPES = {
    "DreamModel": "Dream",
    "DreamForCausalLM": "Dream",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen",
    "LLaDAModelLM": "llada",
    "StableDiffcoderForCausalLM": "llama",
}


def facts_of(
    folder: Path, architecture: str, *, words: dict[str, int] | None = None, mask_token: str | None = None,
    generation: dict[str, Any] | None = None, **config: Any,
) -> CheckpointFacts:  # fmt: skip
    """A folder of that family; `words` are tokens of its tokenizer without a role."""
    write_stub(folder, 10, mask_id=3, eos_ids=(5,))
    stated = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture],
              "vocab_size": ROWS[architecture], **config}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"mask_token": mask_token} if mask_token else {})
    )
    (folder / "added_tokens.json").write_text(json.dumps(words or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint(folder)


def mask_of(facts: CheckpointFacts) -> tuple[int | None, str]:
    return facts.mask_token_id, facts.mask_source


def test_dreams_generation_config_says_null_and_is_not_asked(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "DreamModel", generation={"mask_token_id": None}, mask_token_id=151666)
    assert mask_of(facts) == (151666, "config.json: mask_token_id")


def test_dreams_tokenizer_helps_where_config_json_says_nothing(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "DreamModel", mask_token="<|mask|>", words={"<|mask|>": 151666})
    assert mask_of(facts) == (151666, "tokenizer_config.json: mask_token")


@pytest.mark.parametrize(("architecture", "mask_id"), [("DreamModel", 151666), ("DreamForCausalLM", 151669)])
def test_dream_and_its_reasoner_fall_back_to_ids_of_their_own(
    tmp_path: Path, architecture: str, mask_id: int
) -> None:
    assert mask_of(facts_of(tmp_path, architecture)) == (mask_id, f"fallback of architecture {architecture}")


def test_fast_dllms_mask_is_a_word_without_a_role(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "Fast_dLLM_QwenForCausalLM", words={"|<MASK>|": 151660})
    assert mask_of(facts) == (151660, "tokenizer: '|<MASK>|' of model_type Fast_dLLM_Qwen")
    assert facts.tokenizer_mask_id is None


def test_fast_dllm_without_that_word_falls_back_to_its_published_id(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "Fast_dLLM_QwenForCausalLM")
    assert mask_of(facts) == (151665, "fallback of model_type Fast_dLLM_Qwen")
    assert facts.places_tried[-2] == (
        "tokenizer: '|<MASK>|' of model_type Fast_dLLM_Qwen (not in the tokenizer's vocabulary)"
    )


def test_lladas_mask_is_the_one_of_config_json(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "LLaDAModelLM", words={"<|mdm_mask|>": 7}, mask_token_id=126336)
    assert mask_of(facts) == (126336, "config.json: mask_token_id")
    assert facts_of(tmp_path, "LLaDAModelLM", words={"<|mdm_mask|>": 7}).mask_token_id == 7


def test_stable_diffcoders_mask_is_named_by_its_tokenizer(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path, "StableDiffcoderForCausalLM", mask_token="<[MASK_TOKEN]>", words={"<[MASK_TOKEN]>": 5}
    )
    assert mask_of(facts) == (5, "tokenizer_config.json: mask_token")


@pytest.mark.parametrize(
    ("architecture", "config", "block_size"),
    [
        ("DreamModel", {}, None),
        ("DreamForCausalLM", {"block_size": 16}, 16),
        ("DreamForCausalLM", {}, 32),
        ("Fast_dLLM_QwenForCausalLM", {"bd_size": 8}, 8),
        ("Fast_dLLM_QwenForCausalLM", {}, 32),
        ("StableDiffcoderForCausalLM", {}, 4),
        ("LLaDAModelLM", {}, None),
    ],
)
def test_the_trained_block_is_read_under_the_familys_key(
    tmp_path: Path, architecture: str, config: dict[str, Any], block_size: int | None
) -> None:
    assert facts_of(tmp_path, architecture, **config).trained_block_size == block_size


def test_lladas_embedding_may_have_more_rows_than_its_vocabulary(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "LLaDAModelLM", vocab_size=126349, embedding_size=126464)
    assert facts.vocab_size == 126464
    assert facts_of(tmp_path, "LLaDAModelLM", embedding_size=None).vocab_size == 126464


def test_lladas_longest_sequence_is_read(tmp_path: Path) -> None:
    assert facts_of(tmp_path, "LLaDAModelLM", max_sequence_length=4096).max_position == 4096


def test_ids_that_end_an_answer_come_from_all_three_places(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        "Fast_dLLM_QwenForCausalLM",
        eos_token_id=151645,
        generation={"eos_token_id": [151645, 151643]},
    )
    assert facts.eos_token_ids == (151645, 151643)
