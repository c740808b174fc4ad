"""Decode traces of each family's own reference loop, reproduced token for token by the engine.

Which loop is which setting of ours stands in `mapping.py`. Loops that no setting of ours has run on our
forward and our choice of tokens.

Forwards: the engine makes the reference's denoising forwards, the same positions in each, up to and including
the one after which the answer is fixed (every position before the first stop id, or below the length limit,
is filled). With ``early_eos_stop`` off it goes on to the end of the block that holds the stop id. Not
compared: the reference's prefill and store forwards, which the engine merges with denoising ones, what the
reference still decodes behind the limit, and what D2F's loop still fills behind the block that holds the stop
id.

The random weights sometimes favour rows of the vocabulary that the tokenizer has no word for. The references
let these win, the engine does not; such a case runs with a tokenizer that names every row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.settings.availability import AVAILABLE_MODELS
from tests.golden.cases import DATA, case_id, decode_cases, golden_root
from tests.golden.loops import load_loop_model
from tests.golden.mapping import (
    LOOPS,
    checkpoint_of,
    engine_case,
    final_ids,
    load_case,
    mask_id_of,
    own_strategy,
    reference_writes,
)

if TYPE_CHECKING:
    from pathlib import Path

RUNNING = [path for path in decode_cases() if path.parent.parent.name in AVAILABLE_MODELS]
OF_THE_ENGINE = [path for path in RUNNING if own_strategy(path) == "multi_bd"]
LOOPS_OF_THEIR_OWN = [path for path in RUNNING if load_case(path)["algorithm"] in LOOPS]
OTHERS = [path for path in decode_cases() if path not in {*OF_THE_ENGINE, *LOOPS_OF_THEIR_OWN}]
ENGINE_CASES = {
    "dream-gqa-decode_multi_bd_b4",
    "dream_reasoner-gqa-decode_multi_bd_b4",
    "dream_reasoner-gqa-decode_multi_bd_b4_eos",
    "llada-mha-decode_multi_bd_b4",
    "sdar-dense_b4_headdim-decode_dynamic_b8_aligned_t07",
    "sdar-dense_b4_headdim-decode_static_b4_unaligned",
    "sdar-dense_b8_tied_mqa-decode_static_b8_eos",
    "sdar_moe-moe_norm_true-decode_dynamic_b4_t08",
    "sdar_moe-moe_norm_false_mixed_layers-decode_static_b8_aligned",
    "llada2_mini-grouped-decode_threshold",
    "llada2_mini-grouped-decode_threshold_block32",
    "llada2_mini-grouped-decode_threshold_eos",
    "llada2_mini-ungrouped-decode_threshold",
}


def test_the_bundled_cases_are_found() -> None:
    if golden_root() != DATA:
        pytest.skip(f"other cases were asked for: {len(decode_cases())} under {golden_root()}")
    assert {case_id(path) for path in OF_THE_ENGINE} >= ENGINE_CASES
    assert {load_case(path)["algorithm"] for path in LOOPS_OF_THEIR_OWN} == set(LOOPS)


@pytest.mark.parametrize("path", OTHERS, ids=case_id)
def test_cases_that_are_not_run_here_are_named(path: Path) -> None:
    family = path.parent.parent.name
    if family not in AVAILABLE_MODELS:
        pytest.skip(f"{case_id(path)} was not run: family {family!r} is not available yet")
    strategy = own_strategy(path) or load_case(path)["algorithm"]
    pytest.skip(f"{case_id(path)} was not run here: strategy {strategy!r} is not available yet")


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("page_size", [4, 16, 32])
@pytest.mark.parametrize("path", OF_THE_ENGINE, ids=case_id)
def test_engine_decodes_like_the_reference_loop(
    path: Path, page_size: int, early_stop: bool, tmp_path: Path
) -> None:
    case = engine_case(path)
    if case.stops_inside and not early_stop:
        pytest.skip(f"the reference of {case_id(path)} has the early stop on, its trace ends there")
    with Diffulex(
        str(checkpoint_of(path, case.writes, tmp_path)),
        **case.settings,
        page_size=max(page_size, case.settings["block_size"]),
        early_eos_stop=early_stop,
        save_trace=True,
        tensor_parallel_size=1,
    ) as llm:
        sampling = SamplingParams(0.0, case.max_tokens, ignore_eos=not case.stop_ids)
        output = llm.generate([case.prompt], sampling).trajectories[0]
    stop = case.first_stop
    end = case.limit if stop is None else stop
    assert output.token_ids == case.output_ids[len(case.prompt) : end]
    assert output.finish_reason == ("length" if stop is None else "stop")
    last = case.end_of_last_block
    writes = [
        sorted((p, t) for p, t, _ in record.filled if p < last)
        for record in output.trajectory
        if record.kind == "denoise"
    ]
    wanted = case.writes[: case.num_until_fixed(to_block_end=not early_stop)]
    assert writes == [[(p, t) for p, t in some if p < last] for some in wanted]
    assert output.nfe.denoise == len(wanted)


@pytest.mark.parametrize("path", LOOPS_OF_THEIR_OWN, ids=case_id)
def test_the_references_own_loop_runs_on_our_forward(path: Path, tmp_path: Path) -> None:
    """Those of SDAR that are a strategy as well run here too: loop and engine vouch for each other."""
    case = load_case(path)
    folder = checkpoint_of(path, reference_writes(case), tmp_path)
    loop = load_loop_model(folder, path.parent.parent.name, mask_id_of(case))
    ids, trace = LOOPS[case["algorithm"]](loop, case)
    assert ids == final_ids(case)
    assert trace == reference_writes(case)
