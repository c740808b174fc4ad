"""Random tiny networks against transformers' DiffusionGemmaForBlockDiffusion, with the same weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from diffulex.sampler.diffusion_gemma import CanvasRules, SeededNoise
from tests.support.canvas import CanvasRun, load_gemma
from tests.support.canvas_loop import decode
from tests.support.gemma_reference import VOCAB, Reference, make_reference, save_reference


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([2, 4, 6]))
    divisors = [n for n in (1, 2, 3) if heads % n == 0]
    num_layers = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.booleans(), min_size=num_layers - 1, max_size=num_layers - 1))
    num_experts = draw(st.integers(2, 5))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(divisors)),
        "num_global_key_value_heads": draw(st.sampled_from([None, *divisors])),
        "head_dim": draw(st.sampled_from([4, 6, 8])),
        "global_head_dim": draw(st.sampled_from([10, 16, 24])),
        "hidden_size": draw(st.sampled_from([12, 20])),
        "intermediate_size": draw(st.sampled_from([10, 16])),
        "num_hidden_layers": num_layers,
        "layer_types": [
            *("full_attention" if full else "sliding_attention" for full in kinds),
            "full_attention",
        ],
        "sliding_window": draw(st.integers(2, 12)),
        "num_experts": num_experts,
        "top_k_experts": draw(st.integers(1, num_experts)),
        "moe_intermediate_size": draw(st.sampled_from([6, 8])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "use_bidirectional_attention": draw(st.sampled_from([None, "vision"])),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e2, 1e4]))},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": draw(st.sampled_from([1e3, 1e6])),
                "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 1.0])),
            },
        },
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=15)
@given(
    shape=shapes(),
    seed=st.integers(0, 10**6),
    canvas_length=st.integers(1, 14),
    offset=st.integers(-3, 8),
    page_size=st.sampled_from([4, 8, 32]),
    num_shards=st.sampled_from([1, 3]),
)
def test_two_canvases_in_a_row_equal_the_reference(
    shape: dict[str, Any], seed: int, canvas_length: int, offset: int, page_size: int, num_shards: int
) -> None:
    """Hidden states, keys and values of the text; first and conditioned steps; the same behind a commit."""
    reference = make_reference(seed, canvas_length, **shape)
    with tempfile.TemporaryDirectory() as name:
        model = load_gemma(save_reference(reference, Path(name), num_shards))
    window = shape["sliding_window"]
    length = max(1, window + offset)
    prompt, first, committed, second = (
        torch.randint(0, VOCAB, (n,)) for n in (length, canvas_length, canvas_length, canvas_length)
    )
    theirs = Reference(reference)
    total = length + 2 * canvas_length
    ours = CanvasRun(model, page_size, num_pages=total // page_size + 3, seed=seed)

    assert_close(ours.encode([(0, prompt, 0)])[0], theirs.encode(prompt))
    assert_same_cache(ours, theirs, length)
    for canvas, start in ((first, length), (second, length + canvas_length)):
        expected = theirs.denoise(canvas)
        assert_close(ours.denoise([(0, canvas, start)])[0], expected)
        feedback = expected / 0.7
        conditioned = theirs.denoise(canvas, feedback)
        assert_close(ours.denoise([(0, canvas, start)], [feedback])[0], conditioned)
        if start == length:
            assert_close(ours.encode([(0, committed, length)])[0], theirs.encode(committed))
            assert_same_cache(ours, theirs, length + canvas_length)


def assert_same_cache(ours: CanvasRun, theirs: Reference, length: int) -> None:
    """The pages hold what the reference keeps: all of the text, or its end in layers with a window."""
    table = torch.tensor(ours.tables[0])
    for layer, kept in zip(ours.model.attention_layers(), theirs.cache.layers, strict=True):
        num_kept = length if layer.window is None else min(length, layer.window - 1)
        for pages, cached in ((layer.k_cache, kept.keys), (layer.v_cache, kept.values)):
            assert pages is not None
            stored = pages[table].flatten(0, 1)[length - num_kept : length]
            assert_close(stored, cached[0].transpose(0, 1)[-num_kept:])


@pytest.mark.parametrize("length", [1, 5, 6, 7, 13])
def test_prompts_around_the_window_equal_the_reference_one_by_one_and_together(
    length: int, tmp_path: Path
) -> None:
    reference = make_reference(5, canvas_length=9)
    model = load_gemma(save_reference(reference, tmp_path))
    torch.manual_seed(length)
    prompts = [torch.randint(0, VOCAB, (n,)) for n in (length, 6, 20)]
    canvases = [torch.randint(0, VOCAB, (9,)) for _ in prompts]
    run = CanvasRun(model, page_size=4, num_pages=20)
    hidden = run.encode([(i, prompt, 0) for i, prompt in enumerate(prompts)])
    logits = run.denoise([(i, canvas, len(prompts[i])) for i, canvas in enumerate(canvases)])
    for i, prompt in enumerate(prompts):
        theirs = Reference(reference)
        assert_close(hidden[i], theirs.encode(prompt))
        assert_close(logits[i], theirs.denoise(canvases[i]))


def test_half_precision_stays_near_the_reference_in_half_precision(tmp_path: Path) -> None:
    reference = make_reference(3)
    model = load_gemma(save_reference(reference, tmp_path), torch.bfloat16)
    wide = load_gemma(tmp_path)
    prompt, canvas = torch.randint(0, VOCAB, (9,)), torch.randint(0, VOCAB, (8,))
    halved = Reference(reference.to(torch.bfloat16))
    halved.encode(prompt)
    expected = halved.denoise(canvas)
    results = []
    for network in (model, wide):
        run = CanvasRun(network, page_size=4, num_pages=8)
        run.encode([(0, prompt, 0)])
        results.append(run.denoise([(0, canvas, 9)])[0])
    assert results[0].dtype == expected.dtype == torch.float32
    # Both round at their own places; neither may be further from the other than from the exact result.
    off = float((results[0] - results[1]).abs().mean())
    assert 0 < off < 0.3
    assert float((results[0] - expected).abs().mean()) < 2 * off


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("stops", [False, True])
def test_a_whole_answer_equals_generate_with_the_same_seed(seed: int, stops: bool, tmp_path: Path) -> None:
    """Our sampler on our network draws from its generator in the order in which the reference does."""
    reference = make_reference(seed, canvas_length=8)
    model = load_gemma(save_reference(reference, tmp_path))
    rules = CanvasRules(
        max_denoising_steps=6, t_min=0.4, t_max=0.8, entropy_bound=2.0, stability_threshold=1,
        confidence_threshold=0.5,
    )  # fmt: skip
    stop_ids = list(range(20, 24)) if stops else [VOCAB + 7]
    prompt = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    expected = reference.generate(
        prompt[None],
        max_new_tokens=20,
        max_denoising_steps=rules.max_denoising_steps,
        t_min=rules.t_min,
        t_max=rules.t_max,
        sampler_config=EntropyBoundSamplerConfig(rules.entropy_bound),
        stability_threshold=rules.stability_threshold,
        confidence_threshold=rules.confidence_threshold,
        eos_token_id=stop_ids,
        pad_token_id=0,
        disable_compile=True,
    ).sequences[0, 9:]
    noise = SeededNoise(VOCAB, torch.Generator().manual_seed(seed))
    answer = decode(model, prompt.tolist(), rules, noise, max_new_tokens=20, stop_ids=stop_ids)
    assert answer.ids == expected.tolist()
    assert len(answer.ids) == 24 or stops
