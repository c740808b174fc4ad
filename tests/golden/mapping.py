"""Decode traces as the families' reference loops wrote them, and the settings of ours that mean the same.

| reference loop | here |
| --- | --- |
| SDAR static, one position a step | `multi_bd`, buffer 1, accept_threshold 1 |
| SDAR dynamic, at least one a step | `multi_bd`, buffer 1, accept_threshold = its threshold |
| LLaDA2 threshold, at least one a step | `multi_bd`, buffer 1, accept_threshold = its threshold |
| LLaDA2.1 editing, DMax | the edit sampler, `dmax` |
| D2F's loop under a block-causal mask | `multi_bd`, its three thresholds, a buffer it does not notice |
| D2F, Fast-dLLM v2 | strategies of their own |
| everything else | a loop in `loops_<family>.py` on our forward |
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tests.golden import loops_dream, loops_llada, loops_llada2, loops_sdar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Writes = list[tuple[int, int]]
LOOPS = {**loops_dream.LOOPS, **loops_llada.LOOPS, **loops_llada2.LOOPS, **loops_sdar.LOOPS}


@dataclass(frozen=True)
class EngineCase:
    """A trace that the engine must reproduce: `settings` of the engine, what was asked for, what was written.

    `writes` holds, for each denoising forward of the reference, the positions it filled and the ids there;
    with `stops_inside` its last forward is the one after which the answer is fixed.
    """

    settings: Mapping[str, Any]
    prompt: list[int]
    output_ids: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    writes: list[Writes]
    stops_inside: bool = False

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def first_stop(self) -> int | None:
        """First position of a stop id below the limit in the reference's answer."""
        places = range(len(self.prompt), min(self.limit, len(self.output_ids)))
        return next((p for p in places if self.output_ids[p] in self.stop_ids), None)

    @property
    def end_of_last_block(self) -> int:
        """Positions from here on lie behind the block of the first stop id; the engine may drop them."""
        if self.first_stop is None:
            return -(-self.limit // self.settings["block_size"]) * self.settings["block_size"]
        return (self.first_stop // self.settings["block_size"] + 1) * self.settings["block_size"]

    def num_until_fixed(self, *, to_block_end: bool) -> int:
        """Denoising forwards after which every position that is waited for is filled.

        These are the positions up to the first stop id, or below the limit; with `to_block_end` up to the end
        of the block that holds the stop id.
        """
        end = self.limit
        if self.first_stop is not None:
            end = min(self.end_of_last_block, self.limit) if to_block_end else self.first_stop + 1
        open_positions = set(range(len(self.prompt), end))
        for number, writes in enumerate(self.writes, 1):
            open_positions -= {position for position, _ in writes}
            if not open_positions:
                return number
        raise AssertionError("the reference's trace ends before its answer")


@lru_cache
def load_case(path: Path) -> dict[str, Any]:
    """The content of a decode file."""
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def reference_writes(case: dict[str, Any]) -> list[Writes]:
    """Writes of each denoising forward of the reference."""
    kinds = case.get("trace_kind", ["denoise"] * len(case["trace"]))
    pairs = zip(kinds, case["trace"], strict=True)
    return [sorted((p, t) for p, t in writes) for kind, writes in pairs if kind == "denoise"]


def final_ids(case: dict[str, Any]) -> list[int]:
    """Prompt and answer as far as the reference decoded."""
    ids: list[int] = case.get("final_ids", case["output_ids"])[0]
    return ids


def mask_id_of(case: dict[str, Any]) -> int:
    """Each reference has its own name for it."""
    params: dict[str, int] = case["params"]
    return params["mask_id"] if "mask_id" in params else params["mask_token_id"]


def own_strategy(path: Path) -> str | None:
    """The strategy that has the reference's rules, None when no setting of ours has them."""
    case = load_case(path)
    algorithm = case["algorithm"]
    if algorithm.startswith("fast_dllm_v2/"):
        return "fast_dllm_v2"
    if algorithm.startswith("joint threshold"):
        return "multi_bd with sampling_mode='edit'"
    if algorithm.startswith("DMax"):
        return "dmax"
    if algorithm in loops_llada2.LOOPS:
        params = case["params"]
        return "multi_bd" if params["steps"] == params["block_length"] else None
    if algorithm == "d2f":
        return "multi_bd" if path.stem.startswith("decode_multi_bd") else "d2f"
    params = case["params"]
    if algorithm in ("block_diffusion/low_confidence_static", "block_diffusion/low_confidence_dynamic"):
        return "multi_bd" if params["denoising_steps"] == params["block_length"] else None
    return None


def engine_case(path: Path) -> EngineCase:
    """The case in our words; only for `multi_bd`."""
    case = load_case(path)
    params = case["params"]
    if case["algorithm"] == "d2f":
        settings = {
            "block_size": params["block_size"],
            # Fewer would hold blocks back that the reference, which has no such limit, opens.
            "buffer_size": max(2, case["stats"]["max_uncached_blocks"]),
            "add_block_threshold": params["block_add_threshold"],
            "semi_complete_threshold": params["decoded_token_threshold"],
            "accept_threshold": params["skip_threshold"],
        }
        max_tokens, stop_ids = params["max_new_tokens"], [params["eos_token_id"]]
    elif case["algorithm"] in loops_llada2.LOOPS:
        settings = {
            "block_size": params["block_length"],
            "buffer_size": 1,
            "accept_threshold": params["threshold"],
        }
        max_tokens, stop_ids = params["gen_length"], [params["eos_id"]]
    else:
        is_dynamic = params["remasking_strategy"] == "low_confidence_dynamic"
        settings = {
            "block_size": params["block_length"],
            "buffer_size": 1,
            "accept_threshold": params["confidence_threshold"] if is_dynamic else 1.0,
        }
        max_tokens, stop_ids = params["gen_length"], params["stop_token_ids"]
    return EngineCase(
        settings={
            "model_name": path.parent.parent.name,
            "decoding_strategy": "multi_bd",
            "mask_token_id": mask_id_of(case),
            **settings,
        },
        prompt=case["prompt_ids"][0],
        output_ids=final_ids(case),
        max_tokens=max_tokens,
        stop_ids=tuple(stop_ids),
        writes=reference_writes(case),
        stops_inside=params.get("eos_early_stop", False),
    )


def checkpoint_of(path: Path, writes: list[Writes], tmp_path: Path) -> Path:
    """The case's checkpoint; with words for all rows when the reference wrote a row without one."""
    spec = json.loads((path.parent / "tokenizer.json").read_text())
    named = {token["id"] for token in spec["added_tokens"]} | set(spec["model"]["vocab"].values())
    if named.issuperset(token for some in writes for _, token in some):
        return path.parent
    folder = tmp_path / "named"
    shutil.copytree(path.parent, folder)
    num_rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    spec["model"]["vocab"] |= {f"row{i}": i for i in range(num_rows) if i not in named}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder
