"""Random tiny networks against transformers' Qwen3, which is SDAR's network with another mask."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from diffulex.attention import masks
from tests.support.checkpoints import write_tokenizer
from tests.support.paged import PagedRun, Part, load

VOCAB = 48

SHAPES = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2]),
        "queries_per_key": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([4, 8, 16]),
        "hidden_size": st.sampled_from([12, 24]),
        "intermediate_size": st.sampled_from([16, 20]),
        "num_hidden_layers": st.integers(1, 3),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
        "rope_theta": st.sampled_from([1e4, 1e6]),
    }
)


def make_reference(shape: dict[str, Any], seed: int) -> Qwen3ForCausalLM:
    shape = dict(shape)
    theta = shape.pop("rope_theta")
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_attention_heads=shape.pop("queries_per_key") * shape["num_key_value_heads"],
        max_position_embeddings=512,
        rope_theta=theta,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **shape,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    return model.eval()


def save_as_sdar(model: Qwen3ForCausalLM, folder: Path, num_shards: int) -> None:
    """The checkpoint as transformers writes it, under SDAR's name."""
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // num_shards + 1 if num_shards > 1 else "1GB")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "mask_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, VOCAB, mask_id=0, eos_ids=(1,))


@settings(max_examples=12)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    length=st.integers(1, 21),
    block=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(["full", "causal", "block_causal", "d2f"]),
    cut=st.integers(0, 4),
    page_size=st.sampled_from([4, 8, 16, 32]),
    num_shards=st.sampled_from([1, 3]),
)
def test_logits_equal_the_reference_for_every_mask_whole_and_over_pages(
    shape: dict[str, Any],
    seed: int,
    length: int,
    block: int,
    kind: str,
    cut: int,
    page_size: int,
    num_shards: int,
) -> None:
    reference = make_reference(shape, seed)
    with tempfile.TemporaryDirectory() as name:
        save_as_sdar(reference, Path(name), num_shards)
        model = load(Path(name))
    mask = {
        "full": lambda: masks.full(length),
        "causal": lambda: masks.causal(length),
        "block_causal": lambda: masks.block_causal(length, block),
        "d2f": lambda: masks.d2f(length, min(5, length), block),
    }[kind]()
    ids = torch.randint(0, VOCAB, (length,))
    additive = torch.zeros(1, 1, length, length).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = reference(input_ids=ids[None], attention_mask=additive, use_cache=False).logits[0]
    ends = mask.sum(dim=-1)
    (whole,) = PagedRun(model).logits([Part(0, ids, ends)])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    # Where the mask lets a prefix be computed on its own, it may come from pages.
    border = next((i for i in range(cut * block, 0, -1) if i < length and int(ends[:i].max()) <= i), 0)
    if border > 0:
        run = PagedRun(model, page_size, num_pages=length // page_size + 1)
        run.logits([Part(0, ids[:border], ends[:border], is_stored=True)])
        (rest,) = run.logits([Part(0, ids[border:], ends[border:], start=border)])
        torch.testing.assert_close(rest, expected[border:], atol=1e-4, rtol=1e-4)
