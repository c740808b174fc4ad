"""Decode traces of each family's own reference loop, reproduced token for token.

| reference loop | here |
| --- | --- |
| SDAR static, one position a step | `multi_bd`, buffer 1, accept_threshold 1 |
| SDAR dynamic, at least one a step | `multi_bd`, buffer 1, accept_threshold = its threshold |
| SDAR with more than one a step, sequential, entropy-bounded | a loop in this file on our forward |

Forwards: the engine makes the reference's denoising forwards, the same positions in each, up to and including
the one after which the answer is fixed (every position before the first stop id, or below the length limit,
is filled). With ``early_eos_stop`` off it goes on to the end of the block that holds the stop id, as the
reference does. Not compared: the reference's prefill and store forwards, which the engine merges with
denoising ones, and what the reference still decodes behind the limit.

The random weights sometimes favour rows of the vocabulary that the tokenizer has no word for. The references
let these win, the engine does not; such a case runs with a tokenizer that names every row.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.config import Config
from diffulex.model.loader import load_model
from diffulex.sampler.base import SamplerInput
from diffulex.sampler.confidence import choose_tokens
from tests.golden.cases import case_id, decode_cases
from tests.support.full_forward import block_causal_ends, full_logits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUPPORTED = ("sdar",)
Writes = list[tuple[int, int]]


def load_case(path: Path) -> dict[str, Any]:
    family = path.parent.parent.name
    if family not in SUPPORTED:
        pytest.skip(f"family {family!r} of {case_id(path)} is not supported yet")
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def is_engine_case(case: dict[str, Any]) -> bool:
    params = case["params"]
    one_a_step = params["denoising_steps"] == params["block_length"]
    return one_a_step and params["remasking_strategy"] in ("low_confidence_static", "low_confidence_dynamic")


def reference_writes(case: dict[str, Any]) -> list[Writes]:
    """Writes of each denoising forward of the reference."""
    pairs = zip(case["trace_kind"], case["trace"], strict=True)
    return [sorted((p, t) for p, t in writes) for kind, writes in pairs if kind == "denoise"]


def first_stop(case: dict[str, Any]) -> int | None:
    """First position of a stop id below the limit in the reference's answer."""
    prompt, params = case["prompt_ids"][0], case["params"]
    limit = len(prompt) + params["gen_length"]
    ids = case["output_ids"][0][:limit]
    hits = [p for p in range(len(prompt), len(ids)) if ids[p] in params["stop_token_ids"]]
    return min(hits, default=None)


def num_until_fixed(case: dict[str, Any], *, to_block_end: bool) -> int:
    """Denoising forwards after which the answer is fixed; with `to_block_end`, its stop block is full."""
    prompt, params = case["prompt_ids"][0], case["params"]
    end, stop = len(prompt) + params["gen_length"], first_stop(case)
    if stop is not None:
        end = stop + 1
        if to_block_end:
            size = params["block_length"]
            end = min((stop // size + 1) * size, len(prompt) + params["gen_length"])
    open_positions = set(range(len(prompt), end))
    for number, writes in enumerate(reference_writes(case), 1):
        open_positions -= {position for position, _ in writes}
        if not open_positions:
            return number
    raise AssertionError("the reference's trace ends before its answer")


def checkpoint_of(path: Path, case: dict[str, Any], tmp_path: Path) -> Path:
    """The case's checkpoint; with words for all rows when the reference wrote a row without one."""
    spec = json.loads((path.parent / "tokenizer.json").read_text())
    named = {token["id"] for token in spec["added_tokens"]} | set(spec["model"]["vocab"].values())
    if named.issuperset(token for writes in reference_writes(case) for _, token in writes):
        return path.parent
    folder = tmp_path / "named"
    shutil.copytree(path.parent, folder)
    num_rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    spec["model"]["vocab"] |= {f"row{i}": i for i in range(num_rows) if i not in named}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("page_size", [4, 16, 32])
@pytest.mark.parametrize("path", decode_cases(), ids=case_id)
def test_engine_decodes_like_the_reference_loop(
    path: Path, page_size: int, early_stop: bool, tmp_path: Path
) -> None:
    case = load_case(path)
    if not is_engine_case(case):
        pytest.skip(f"{case_id(path)} is a loop of its own, checked by the test below")
    params, prompt = case["params"], case["prompt_ids"][0]
    dynamic = params["remasking_strategy"] == "low_confidence_dynamic"
    with Diffulex(
        str(checkpoint_of(path, case, tmp_path)),
        model_name="sdar",
        decoding_strategy="multi_bd",
        block_size=params["block_length"],
        buffer_size=1,
        page_size=max(page_size, params["block_length"]),
        accept_threshold=params["confidence_threshold"] if dynamic else 1.0,
        early_eos_stop=early_stop,
        save_trace=True,
        tensor_parallel_size=1,
    ) as llm:
        sampling = SamplingParams(0.0, params["gen_length"], ignore_eos=not params["stop_token_ids"])
        output = llm.generate([prompt], sampling).trajectories[0]
    stop = first_stop(case)
    end = len(prompt) + params["gen_length"] if stop is None else stop
    assert output.token_ids == case["output_ids"][0][len(prompt) : end]
    assert output.finish_reason == ("length" if stop is None else "stop")
    writes = [
        sorted((p, t) for p, t, _ in record.filled)
        for record in output.trajectory
        if record.kind == "denoise"
    ]
    wanted = reference_writes(case)[: num_until_fixed(case, to_block_end=not early_stop)]
    assert writes == wanted
    assert output.nfe.denoise == len(wanted)


def sequential(conf: torch.Tensor, entropy: torch.Tensor, count: int, params: dict[str, Any]) -> list[int]:
    """The first open positions."""
    return list(range(min(count, len(conf))))


def static(conf: torch.Tensor, entropy: torch.Tensor, count: int, params: dict[str, Any]) -> list[int]:
    """The open positions of highest confidence."""
    return torch.topk(conf, min(count, len(conf))).indices.tolist()


def dynamic(conf: torch.Tensor, entropy: torch.Tensor, count: int, params: dict[str, Any]) -> list[int]:
    """All above the threshold when these are enough, else the best."""
    sure = torch.nonzero(conf > params["confidence_threshold"])[:, 0].tolist()
    return sure if len(sure) >= count else static(conf, entropy, count, params)


def entropy_bounded(
    conf: torch.Tensor, entropy: torch.Tensor, count: int, params: dict[str, Any]
) -> list[int]:
    """Positions of lowest entropy as long as their sum stays below the bound, one at least."""
    order = torch.argsort(entropy)
    num = int((torch.cumsum(entropy[order], 0) < params["eb_threshold"]).sum())
    return order[: max(num, 1)].tolist()


CHOICES: dict[str, Callable[[torch.Tensor, torch.Tensor, int, dict[str, Any]], list[int]]] = {
    "sequential": sequential,
    "low_confidence_static": static,
    "low_confidence_dynamic": dynamic,
    "entropy_bounded": entropy_bounded,
}


@pytest.mark.parametrize("path", decode_cases(), ids=case_id)
def test_own_loops_of_the_reference_run_on_our_forward(path: Path, tmp_path: Path) -> None:
    case = load_case(path)
    params, ids = case["params"], list(case["prompt_ids"][0])
    folder = checkpoint_of(path, case, tmp_path)
    config = Config(model=str(folder), model_name="sdar", mask_token_id=params["mask_token_id"])
    model = load_model(config, torch.device("cpu"), torch.float32)
    size, steps = params["block_length"], params["denoising_steps"]
    total = -(-(len(ids) + params["gen_length"]) // size) * size
    schedule = [size // steps + (step < size % steps) for step in range(steps)]
    choose = CHOICES[params["remasking_strategy"]]
    mask, trace = params["mask_token_id"], []
    num_prompt = len(ids)
    for start in range(num_prompt // size * size, total, size):
        ids += [mask] * (start + size - len(ids))
        for step in range(steps + 1):
            open_at = [p for p in range(max(start, num_prompt), start + size) if ids[p] == mask]
            if not open_at:
                break
            logits = full_logits(model, ids, block_causal_ends(len(ids), size))[open_at]
            inputs = SamplerInput(
                torch.zeros(len(open_at), dtype=torch.int64), torch.ones(1, dtype=torch.bool), 1.0, mask,
                config.vocab_limit,
            )  # fmt: skip
            token, conf, _ = choose_tokens(logits, inputs)
            probs = logits.softmax(-1)
            entropy = -(probs * (probs + 1e-12).log()).sum(-1)
            picks = choose(conf, entropy, schedule[min(step, steps - 1)], params)
            trace.append(sorted((open_at[i], int(token[i])) for i in picks))
            for i in picks:
                ids[open_at[i]] = int(token[i])
        if any(one in params["stop_token_ids"] for one in ids[num_prompt:]):
            break
    assert ids == case["output_ids"][0]
    assert trace == reference_writes(case)
