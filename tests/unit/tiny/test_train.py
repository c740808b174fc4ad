import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from diffulex_bench.tiny import bundled_model
from diffulex_bench.tiny.card import card_text
from diffulex_bench.tiny.checkpoint import load_weights
from diffulex_bench.tiny.data import validation_problems
from diffulex_bench.tiny.decode import DecodeSettings, decode
from diffulex_bench.tiny.evaluate import evaluate, result_of, summarise
from diffulex_bench.tiny.feed import as_tensors, batch_loader, training_batches
from diffulex_bench.tiny.network import Network
from diffulex_bench.tiny.optimiser import orthogonal, rate_factor
from diffulex_bench.tiny.recipe import RECIPES, Optimisation
from diffulex_bench.tiny.tokenizer import TextEncoder
from diffulex_bench.tiny.train import main, make_encoder, train

SMOKE = RECIPES["smoke"]


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return make_encoder(SMOKE)


@pytest.fixture(scope="module")
def trained() -> tuple[Network, TextEncoder]:
    folder = bundled_model("tiny-sdar")
    network = Network(RECIPES["sdar"].shape).eval()
    load_weights(network, folder)
    return network, TextEncoder.load(folder)


def test_a_few_steps_on_the_cpu_lower_the_loss(encoder: TextEncoder):
    torch.manual_seed(0)
    recipe = dataclasses.replace(SMOKE, max_steps=20)
    curve = train(Network(recipe.shape), recipe, encoder, num_workers=0)
    assert curve[0].step == 1
    assert curve[-1].step == 20
    assert curve[-1].num_problems > curve[0].num_problems > 0
    assert curve[-1].loss < curve[0].loss - 0.7


def test_command_writes_a_complete_folder_with_a_card(tmp_path: Path):
    main(
        [
            "--recipe",
            "smoke",
            "--output",
            str(tmp_path),
            "--workers",
            "0",
            "--seconds",
            "2",
            "--num-problems",
            "1",
        ]
    )
    written = {path.name for path in tmp_path.iterdir()}
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "training.json",
    }
    assert expected | {"README.md", "tokenizer_config.json", "special_tokens_map.json"} == written
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["test"]["single block, accept 0.9"]["without length cut"]["num_problems"] == 1
    assert (
        "| test, without length cut | single block, accept 0.9 | 1 |" in (tmp_path / "README.md").read_text()
    )


def test_bundled_card_says_what_its_report_says():
    folder = bundled_model("tiny-sdar")
    report = json.loads((folder / "training.json").read_text())
    assert (folder / "README.md").read_text() == card_text(report)


def test_batches_are_the_same_for_the_same_seed_and_differ_otherwise(encoder: TextEncoder):
    first, again, other = (next(training_batches(SMOKE, encoder, seed)) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.group, again.group)
    assert not np.array_equal(first.ids, other.ids)


def test_worker_processes_give_the_batches_of_their_seeds(encoder: TextEncoder):
    loader = iter(batch_loader(SMOKE, encoder, num_workers=2, pin=False))
    for worker in range(2):
        expected = as_tensors(next(training_batches(SMOKE, encoder, SMOKE.seed + worker)))
        assert torch.equal(next(loader)["ids"], expected["ids"])


def test_loss_places_cover_every_masked_token_once(encoder: TextEncoder):
    batch = next(training_batches(SMOKE, encoder, 1))
    tensors = as_tensors(batch)
    counts = tensors["loss_target"] >= 0
    places = tensors["loss_index"][counts]
    assert torch.equal(places, torch.from_numpy(np.flatnonzero(batch.targets.reshape(-1) >= 0)))
    assert len(tensors["loss_index"].unique()) == len(tensors["loss_index"])


@pytest.mark.parametrize("size", [(2, 8, 8), (3, 6, 20), (3, 20, 6)])
def test_orthogonal_gives_singular_values_near_one(size: tuple[int, int, int]):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(size)))
    # The quintic iteration settles between about 0.7 and 1.2, which is close enough for an update direction.
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_rate_rises_stays_flat_and_falls_to_its_final_share():
    settings = Optimisation(warmup_steps=10, flat_until=0.3, final_factor=0.01)
    assert rate_factor(settings, 0, 0.0) == pytest.approx(0.1)
    assert rate_factor(settings, 50, 0.3) == 1.0
    assert rate_factor(settings, 50, 0.65) == pytest.approx(0.505)
    assert rate_factor(settings, 50, 1.0) == pytest.approx(0.01)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_bundled_model_solves_validation_problems_in_few_forwards(
    trained: tuple[Network, TextEncoder], buffer_size: int
):
    network, encoder = trained
    problems = validation_problems(8, seed=9)
    summary = summarise(
        evaluate(network, problems, encoder, DecodeSettings(buffer_size=buffer_size), batch_size=8)
    )
    assert summary.accuracy >= 0.75
    assert summary.unfinished == 0
    assert summary.tpf > 8


def test_decoding_a_batch_equals_decoding_one_by_one(trained: tuple[Network, TextEncoder]):
    network, encoder = trained
    prompts = [encoder.encode(problem.prompt) for problem in validation_problems(3, seed=5)]
    for settings in (DecodeSettings(), DecodeSettings(buffer_size=3)):
        together = decode(network, prompts, settings)
        assert together == [decode(network, [prompt], settings)[0] for prompt in prompts]


def test_answers_stop_at_the_token_limit(trained: tuple[Network, TextEncoder]):
    network, encoder = trained
    prompt = encoder.encode(validation_problems(1, seed=5)[0].prompt)
    answer = decode(network, [prompt], DecodeSettings(max_tokens=7))[0]
    assert len(answer.ids) == 7
    assert not answer.is_finished


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 18.0", 18.0),
        ("#### 1,250", 1250.0),
        ("#### $3", 3.0),
        ("#### 1\n#### 2", 2.0),
        ("18", None),
    ],
)
def test_result_is_the_number_behind_the_last_mark(text: str, number: float | None):
    assert result_of(text) == number
