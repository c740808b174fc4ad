"""The request, scheduler and sampler rules against prediction tables, without a model.

Each vector holds a table of predictions and what the decoding rules make of it: output, accepted positions
per forward, and forwards with and without the lossless accelerations. ``DIFFULEX_GOLDEN_ROOT`` runs other
vectors.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.golden.cases import fsm_cases
from tests.support.checkpoints import write_stub
from tests.support.engines import Harness, Twist

if TYPE_CHECKING:
    from pathlib import Path

#: Kinds that `multi_bd` with the naive sampler decodes; the others need samplers that are not there yet.
SUPPORTED_KINDS = ("naive",)
SWITCHES = {
    "none": {"activate_in_prefill": False, "overlap_store": False, "early_eos_stop": False},
    "A": {"overlap_store": False, "early_eos_stop": False},
    "A+B": {"early_eos_stop": False},
    "A+B+C": {},
}


def table_logits(case: dict[str, Any]) -> torch.Tensor:
    """``[positions, vocabulary]``: row p carries the prediction for p, or for p + 1 with ``shift``."""
    table, vocab = case["table"], case["vocab_size"]
    first, shift = table["first_position"], int(case["shift"])
    tokens = [*case["prompt_ids"][:first], *table["token_when_masked"]]
    probs = [0.97] * first + table["conf_when_masked"]
    length = len(tokens) + 2048
    tokens += [2] * (length - len(tokens))
    probs += [0.5] * (length - len(probs))
    logits = torch.zeros(length, vocab)
    for position in range(length):
        source = min(position + shift, length - 1)
        # The confidence is taken over the whole vocabulary, the mask id included.
        logits[position, tokens[source]] = math.log(probs[source] * (vocab - 1) / (1 - probs[source]))
    return logits


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("page_size", [8, 32])
@pytest.mark.parametrize("path", fsm_cases(), ids=lambda path: path.stem)
def test_tables_decode_as_the_rules_say(
    path: Path, page_size: int, switches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = json.loads(path.read_text())
    if case["kind"] not in SUPPORTED_KINDS:
        pytest.skip(f"kind {case['kind']!r} of {path.name} needs a sampler that is not available yet")
    params = case["params"]
    if params["block_size"] > page_size:
        page_size = 32
    monkeypatch.setattr(Twist, "shift", case["shift"])
    monkeypatch.setattr(Twist, "always_force", case["force_rule"] == "always")
    monkeypatch.setattr(Twist, "table", table_logits(case))
    folder = write_stub(
        tmp_path, case["vocab_size"], mask_id=case["mask_token_id"], eos_ids=[case["eos_token_id"]]
    )
    harness = Harness(
        model=str(folder),
        block_size=params["block_size"],
        buffer_size=params["buffer_size"],
        page_size=page_size,
        num_pages=1024,
        add_block_threshold=params["add_block_threshold"],
        semi_complete_threshold=params["semi_complete_threshold"],
        accept_threshold=params["accept_threshold"],
        token_stability_threshold=params["token_stability_threshold"],
        **SWITCHES[switches],
    )
    req = harness.add(case["prompt_ids"], max_tokens=1024)
    harness.run()
    expect = case["expect"]
    assert req.completion_reason == "eos_token_generated"
    assert req.output_ids() == expect["output_ids"]
    last = req.num_prompt + len(expect["output_ids"])
    cut = [[list(write) for write in step if write[0] <= last] for step in harness.accepted[0]]
    assert [step for step in cut if step] == expect["accept_sequence"]
    forwards = expect["nfe_source_engine"] if switches == "none" else expect["nfe_with"][switches]
    assert req.nfe.total == forwards
