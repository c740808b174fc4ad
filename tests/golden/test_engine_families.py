"""The engine over each golden checkpoint: tokens are those of a plain loop, whatever the cache and the batch.

The loop recomputes the whole text in every forward pass and knows no pages, no prefixes and no batch mates.
For families whose row i - 1 predicts position i it is the boundary between what is cached and what is read
that matters: prompts that end on pages and blocks, that are cached wholly, and that share beginnings.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from diffulex.sampler.base import SamplerInput
from diffulex.sampler.confidence import choose_tokens
from diffulex.settings.availability import AVAILABLE_MODELS
from diffulex.settings.defaults import MODEL_DEFAULTS
from diffulex.utils.checkpoint import read_checkpoint
from tests.golden.cases import model_folders
from tests.golden.loops import LoopModel, load_loop_model
from tests.support.full_forward import full_logits
from tests.support.live_families import FAMILIES
from tests.support.real_engines import essence, greedy, make_engine
from tests.support.reference_loop import LoopRules, block_diffusion

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# Cases with an adapter have the same network as another case of their family.
FOLDERS = [
    folder
    for folder in model_folders()
    if folder.parent.name in AVAILABLE_MODELS
    and "multi_bd" in MODEL_DEFAULTS[folder.parent.name].strategies
    and not (folder / "adapter").is_dir()
]
BLOCK, BUFFER, ACCEPT, MAX_TOKENS = 4, 3, 0.7, 21
LENGTHS = (1, 3, 4, 8, 13, 16, 40)


def prompts_of(folder: Path) -> list[list[int]]:
    """Prompts of ordinary words, some of them beginnings of others."""
    facts = read_checkpoint(folder)
    special = {facts.mask_token_id, *facts.eos_token_ids}
    ordinary = [one for one in range(min(facts.tokenizer_size, facts.vocab_size)) if one not in special]
    draw = random.Random(7)
    words, fresh = draw.choices(ordinary, k=40), draw.choices(ordinary, k=5)
    return [words[:length] for length in LENGTHS] + [words[:16] + fresh, fresh]


def predict(loop: LoopModel, tokens: NDArray[np.int64], ends: NDArray[np.int64]) -> Any:
    """Best token of each row and its probability."""
    ends_L = torch.from_numpy(np.minimum(ends, len(tokens)).astype(np.int32))
    logits = full_logits(loop.model, tokens.tolist(), ends_L)
    groups = torch.zeros(len(tokens), dtype=torch.int64)
    inputs = SamplerInput(groups, torch.ones(1, dtype=torch.bool), 1.0, loop.mask_id, loop.vocab_limit)
    token, confidence, _ = choose_tokens(logits, inputs)
    return token.numpy(), confidence.numpy()


@lru_cache
def expected(folder: Path) -> list[tuple[list[int], str, int]]:
    """What each prompt gives, from the plain loop."""
    facts = read_checkpoint(folder)
    assert facts.mask_token_id is not None
    family = MODEL_DEFAULTS[folder.parent.name]
    loop = load_loop_model(folder, folder.parent.name, facts.mask_token_id)
    rules = LoopRules(
        BLOCK, BUFFER, facts.mask_token_id, facts.eos_token_ids, accept=ACCEPT, max_tokens=MAX_TOKENS,
        shift=family.shift_logits, always_force=family.force_rule == "always",
    )  # fmt: skip
    results = [
        block_diffusion(prompt, rules, lambda tokens, ends: predict(loop, tokens, ends))
        for prompt in prompts_of(folder)
    ]
    return [(one.output_ids, one.reason, one.num_denoise) for one in results]


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4},
        {"page_size": 8, "enable_prefix_caching": False},
        {"page_size": 16, "max_num_reqs": 1},
        {"page_size": 4, "num_pages": 16},
        {"page_size": 4, "max_num_batched_tokens": 64, "max_model_len": 64},
        {"page_size": 32, "max_num_reqs": 2, "needed_logits_only": False, "activate_in_prefill": False},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)


@SETTINGS
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_tokens_are_those_of_the_plain_loop(folder: Path, settings: dict[str, Any]) -> None:
    check(folder, settings)


@pytest.fixture(scope="module")
def live_diffcoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the family that has no golden case; its name is that of its parent folder."""
    folder: Path = tmp_path_factory.mktemp("live") / "stable_diffcoder" / "random"
    shape = {
        "num_key_value_heads": 1, "queries_per_key": 2, "head_dim": 8, "hidden_size": 16, "rope_theta": 5e5,
        "intermediate_size": 24, "num_hidden_layers": 2, "attention_bias": False, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    FAMILIES["stable_diffcoder"].save(FAMILIES["stable_diffcoder"].make_reference(shape, seed=3), folder)
    return folder


@SETTINGS
def test_stable_diffcoder_fills_every_open_block_in_every_step(
    live_diffcoder: Path, settings: dict[str, Any]
) -> None:
    check(live_diffcoder, settings)


def check(folder: Path, settings: dict[str, Any]) -> None:
    with make_engine(
        folder, model_name=folder.parent.name, block_size=BLOCK, buffer_size=BUFFER, accept_threshold=ACCEPT,
        **settings,
    ) as engine:  # fmt: skip
        first = engine.generate(prompts_of(folder), greedy(MAX_TOKENS)).trajectories
        # Now every prompt that was stored is found again, up to its last page.
        second = engine.generate(prompts_of(folder), greedy(MAX_TOKENS)).trajectories
    assert [essence(output) for output in first] == expected(folder)
    assert [essence(output) for output in second] == expected(folder)
    if settings.get("enable_prefix_caching", True) and "num_pages" not in settings:
        assert sum(output.num_cached_tokens for output in second) > 0
