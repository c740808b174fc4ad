"""The canvas sampler against transformers' classes, and rules that hold whatever is drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from diffulex.sampler.diffusion_gemma import (
    CanvasRules,
    CanvasStep,
    SeededNoise,
    StopTest,
    accept_by_entropy,
    denoise_step,
    token_entropy,
)

RULES = CanvasRules(
    max_denoising_steps=48, t_min=0.4, t_max=0.8, entropy_bound=0.1, stability_threshold=1,
    confidence_threshold=0.005,
)  # fmt: skip


def random_logits(seed: int, num: int = 16, vocab: int = 24, sharpness: float = 4.0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * sharpness


def step_of(argmax: list[int], entropy: list[float]) -> CanvasStep:
    ids = torch.tensor(argmax)
    return CanvasStep(ids, ids, torch.tensor(entropy), torch.ones(len(ids), dtype=torch.bool), ids)


class TestSchedule:
    @given(num_steps=st.integers(1, 60), t_min=st.floats(0, 1), span=st.floats(1e-3, 2))
    def test_temperatures_equal_the_reference_and_fall(
        self, num_steps: int, t_min: float, span: float
    ) -> None:
        rules = replace(RULES, max_denoising_steps=num_steps, t_min=t_min, t_max=t_min + span)
        reference = LinearTemperatureScheduleLogitsProcessor(t_min, t_min + span, num_steps)
        temperatures = [rules.temperature(left) for left in range(num_steps, 0, -1)]
        logits = random_logits(num_steps)
        for left, temperature in zip(range(num_steps, 0, -1), temperatures, strict=True):
            assert torch.equal(reference(None, logits, cur_step=left), logits / temperature)
        assert temperatures[0] == pytest.approx(t_min + span)
        assert all(later < earlier for earlier, later in pairwise(temperatures))
        assert temperatures[-1] > t_min

    @pytest.mark.parametrize(
        ("change", "rule"),
        [
            ({"t_max": 0.4}, r"t_max must be above t_min \(0\.4\), it is 0\.4"),
            ({"t_min": -0.1}, "t_min must be at least 0"),
            ({"entropy_bound": 0.0}, "entropy_bound must be above 0"),
            ({"confidence_threshold": 0.0}, "confidence_threshold must be above 0"),
            ({"max_denoising_steps": 0}, "max_denoising_steps must be at least 1"),
            ({"stability_threshold": -1}, "stability_threshold must be at least 0"),
        ],
    )
    def test_values_out_of_range_are_refused_by_name(self, change: dict[str, float], rule: str) -> None:
        with pytest.raises(ValueError, match=rule):
            replace(RULES, **change)


class TestEntropy:
    @given(seed=st.integers(0, 999), sharpness=st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    def test_entropy_equals_the_distributions_own(self, seed: int, sharpness: float) -> None:
        logits = random_logits(seed, sharpness=sharpness)
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(token_entropy(logits), expected, atol=1e-5, rtol=1e-5)

    def test_extremes_are_zero_and_the_logarithm_of_the_vocabulary(self) -> None:
        logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1e4, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]])
        assert token_entropy(logits).tolist() == pytest.approx([math.log(4), 0.0, math.log(2)])

    def test_half_precision_logits_are_widened_first(self) -> None:
        logits = random_logits(1).bfloat16()
        assert torch.equal(token_entropy(logits), token_entropy(logits.float()))


class TestAcceptance:
    @given(
        seed=st.integers(0, 9999),
        bound=st.one_of(st.sampled_from([1e-9, 0.1, 2.0, 1e9]), st.floats(1e-6, 20)),
        num=st.integers(1, 32),
        sharpness=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    )
    def test_accepted_positions_equal_the_reference(
        self, seed: int, bound: float, num: int, sharpness: float
    ) -> None:
        logits = random_logits(seed, num, sharpness=sharpness)
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(float(bound)), num, 24, 48)
        ids = torch.zeros(1, num, dtype=torch.int64)
        sampler.accept_canvas(ids, ids, logits[None], cur_step=1)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        accepted = accept_by_entropy(entropy, bound)
        if len(entropy.unique()) == num:
            assert torch.equal(accepted, sampler.accepted_token_mask[0])
        assert int(accepted.sum()) == int(sampler.accepted_token_mask.sum())

    def test_the_bound_itself_is_within_and_the_largest_is_not_counted(self) -> None:
        entropy = torch.tensor([0.5, 0.25, 4.0, 0.25])
        assert accept_by_entropy(entropy, 1.0).tolist() == [True, True, True, True]
        assert accept_by_entropy(entropy, 0.99).tolist() == [True, True, False, True]
        assert accept_by_entropy(entropy, 0.5).tolist() == [True, True, False, True]
        assert accept_by_entropy(entropy, 0.49).tolist() == [False, True, False, True]

    def test_of_equal_entropies_the_first_positions_are_accepted(self) -> None:
        assert accept_by_entropy(torch.full((4,), 0.4), 0.5).tolist() == [True, True, False, False]
        assert accept_by_entropy(torch.full((40,), 0.4), 0.5).nonzero().flatten().tolist() == [0, 1]

    @given(entropy=st.lists(st.floats(0, 5, width=32), min_size=1, max_size=20), bound=st.floats(1e-3, 9))
    def test_accepted_positions_are_a_beginning_of_the_order_and_grow_with_the_bound(
        self, entropy: list[float], bound: float
    ) -> None:
        values = torch.tensor(entropy)
        accepted = accept_by_entropy(values, bound)
        assert bool(accepted[values.argmin()])
        if not bool(accepted.all()):
            assert float(values[accepted].max()) <= float(values[~accepted].min())
        assert bool((accept_by_entropy(values, bound * 2) | ~accepted).all())


class TestStop:
    @given(
        threshold=st.integers(0, 3),
        confidence=st.sampled_from([0.05, 0.3, 2.0]),
        seed=st.integers(0, 9999),
    )
    def test_a_canvas_is_done_when_the_reference_says_so(
        self, threshold: int, confidence: float, seed: int
    ) -> None:
        rules = replace(
            RULES, max_denoising_steps=99, stability_threshold=threshold, confidence_threshold=confidence
        )
        ours, theirs = StopTest(rules), StableAndConfidentStoppingCriteria(threshold, confidence)
        draw = torch.Generator().manual_seed(seed)
        for _ in range(2):
            for _ in range(12):
                # Few different canvases, so that equal ones follow each other.
                argmax = torch.randint(2, (1,), generator=draw).expand(3)
                sharpness = float(torch.rand((), generator=draw)) * 12
                logits = torch.nn.functional.one_hot(argmax, 6) * sharpness
                step = CanvasStep(argmax, argmax, token_entropy(logits), argmax == argmax, argmax)
                assert ours.is_done(step) == bool(theirs(argmax[None], logits[None].float())[0])
            ours.reset()
            theirs.reset()

    def test_the_earliest_stop_comes_one_step_after_the_threshold(self) -> None:
        for threshold in (0, 1, 2, 3):
            test = StopTest(replace(RULES, stability_threshold=threshold))
            done = [test.is_done(step_of([1, 2], [0.0, 0.0])) for _ in range(threshold + 1)]
            assert done == [False] * threshold + [True]

    def test_the_mean_entropy_must_lie_strictly_below(self) -> None:
        rules = replace(RULES, stability_threshold=0, confidence_threshold=0.5)
        assert not StopTest(rules).is_done(step_of([1, 2], [0.25, 0.75]))
        assert StopTest(rules).is_done(step_of([1, 2], [0.25, 0.7]))

    def test_the_last_step_ends_a_canvas_that_is_not_certain(self) -> None:
        test = StopTest(replace(RULES, max_denoising_steps=3))
        assert [test.is_done(step_of([i], [5.0])) for i in range(3)] == [False, False, True]
        test.reset()
        assert not test.is_done(step_of([9], [5.0]))


class TestStep:
    def test_accepted_positions_take_the_draw_and_others_new_noise(self) -> None:
        class Noise:
            def initial_canvas(self, num: int) -> torch.Tensor:
                raise AssertionError("a step starts no canvas")

            def draw(self, logits_CV: torch.Tensor) -> torch.Tensor:
                return torch.tensor([20, 21, 22])

            def refill(self, num: int) -> torch.Tensor:
                return torch.tensor([10, 11, 12])[:num]

        logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.1], [0.0, 20.0, 0.0]])
        step = denoise_step(logits, Noise(), entropy_bound=1e-9)
        assert step.accepted_C.tolist() == [False, False, True]
        assert step.next_C.tolist() == [10, 11, 22]
        assert step.argmax_C.tolist() == [0, 2, 1]
        assert denoise_step(logits, Noise(), 1e9).next_C.tolist() == [20, 21, 22]

    def test_a_seed_repeats_its_noise_and_greedy_draws_leave_the_refill_alone(self) -> None:
        logits = random_logits(3, sharpness=0.5)

        def noise(seed: int, *, is_greedy: bool = False) -> SeededNoise:
            return SeededNoise(24, torch.Generator().manual_seed(seed), is_greedy=is_greedy)

        first, second = noise(5), noise(5)
        for _ in range(2):
            ours, again = denoise_step(logits, first, 0.5), denoise_step(logits, second, 0.5)
            assert torch.equal(ours.next_C, again.next_C)
        assert torch.equal(noise(5, is_greedy=True).draw(logits), logits.argmax(-1))
        assert not torch.equal(noise(5).draw(logits), logits.argmax(-1))
        assert torch.equal(noise(5, is_greedy=True).refill(9), noise(5).refill(9))
        assert not torch.equal(noise(6).initial_canvas(9), noise(5).initial_canvas(9))

    def test_random_ids_cover_every_row_of_the_embedding_evenly(self) -> None:
        ids = SeededNoise(8, torch.Generator().manual_seed(0)).initial_canvas(8000)
        counts = ids.bincount(minlength=8)
        assert len(counts) == 8
        # 1000 expected, standard deviation 30.
        assert int(counts.min()) > 850
        assert int(counts.max()) < 1150
