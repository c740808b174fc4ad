"""Train a tiny model: ``python -m diffulex_bench.tiny.train --output DIR``, minutes on one GPU.

Writes the checkpoint folder, the loss curve and figures on held-out problems. ``--recipe smoke`` runs on a CPU in a minute
and only shows that everything works.
"""

import argparse
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from diffulex.logger import get_logger, setup_logger
from diffulex_bench.tiny.checkpoint import load_weights, save_checkpoint, save_exact_weights
from diffulex_bench.tiny.data import Problem, problem_stream, test_problems, validation_problems
from diffulex_bench.tiny.decode import DecodeSettings
from diffulex_bench.tiny.evaluate import Outcome, by_template, evaluate, summarise
from diffulex_bench.tiny.feed import batch_loader, training_text
from diffulex_bench.tiny.network import Network, Visibility, block_visibility, dense_visibility
from diffulex_bench.tiny.optimiser import make_optimisers, rate_factor
from diffulex_bench.tiny.recipe import RECIPES, Recipe
from diffulex_bench.tiny.tokenizer import TextEncoder, train_tokenizer

logger = get_logger(__name__)

_LOG_EVERY = 100
_DECODINGS = {
    "single block, accept 0.9": DecodeSettings(),
    "multi, buffer 4, accept 0.9": DecodeSettings(buffer_size=4),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the learning rate's course that one process runs through, as shares of the whole."""

    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean loss of the steps since the last point."""

    step: int
    seconds: float
    loss: float


def make_encoder(recipe: Recipe) -> TextEncoder:
    """Return the recipe's tokenizer, trained on the first problems of its training stream."""
    problems = list(islice(problem_stream("train", recipe.seed), recipe.tokenizer_problems))
    texts = (text for problem in problems for text in (problem.prompt, training_text(problem, recipe)))
    return train_tokenizer(texts, recipe.shape.vocab_size)


def train(
    network: Network,
    recipe: Recipe,
    encoder: TextEncoder,
    num_workers: int,
    span: Span = Span(),
    first_seed: int | None = None,
) -> list[LossPoint]:
    """Train the network in place and return its loss curve.

    Args:
        network: On the device to train on.
        recipe: What to train.
        encoder: The recipe's tokenizer.
        num_workers: Processes that make batches; 0 makes them in this process.
        span: Part of the course to run; the recipe's seconds are the time for this part.
        first_seed: Seed of the first batch process when a run is continued; the recipe's when left out.
    """
    device = network.model.embed_tokens.weight.device
    is_cuda = device.type == "cuda"
    optimisers = make_optimisers(network, recipe.optimisation)
    loss_of = _Objective(network, is_cuda)
    curve: list[LossPoint] = []
    total = torch.zeros((), device=device)
    began = time.monotonic()
    log_every = min(_LOG_EVERY, max(1, recipe.max_steps // 10))
    network.train()
    for step, batch in enumerate(batch_loader(recipe, encoder, num_workers, is_cuda, first_seed)):
        elapsed = time.monotonic() - began
        share = max(elapsed / recipe.seconds, step / recipe.max_steps)
        if share >= 1.0:
            break
        factor = rate_factor(recipe.optimisation, step, span.start + (span.end - span.start) * share)
        loss = loss_of({name: part.to(device, non_blocking=True) for name, part in batch.items()})
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full_rate"] * factor
            optimiser.step()
            optimiser.zero_grad()
        total += loss.detach()
        if step == 0 or (step + 1) % log_every == 0:
            num_steps = 1 if step == 0 else step + 1 - curve[-1].step
            curve.append(LossPoint(step + 1, round(time.monotonic() - began, 1), float(total) / num_steps))
            total.zero_()
            logger.info("step %d, %.1f s, rate factor %.3f, loss %.4f", step + 1, elapsed, factor, curve[-1].loss)
            if step == 0:
                began = time.monotonic()  # compilation happens in the first step and is no training time
    network.eval()
    return curve


class _Objective:
    """Mean cross-entropy over the masked answer tokens of a batch; compiled and in bfloat16 on a CUDA device."""

    def __init__(self, network: Network, is_cuda: bool) -> None:
        self.network = network
        self.is_cuda = is_cuda
        self.visibility = torch.compile(block_visibility) if is_cuda else dense_visibility
        if is_cuda:
            for layer in network.model.layers:
                layer.compile(dynamic=False)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        visible: Visibility = self.visibility(batch["problem"], batch["block"], batch["group"], batch["clean_end"])
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_cuda):
            hidden = self.network(batch["ids"], batch["positions"], visible)
            chosen = hidden.flatten(0, 1).index_select(0, batch["loss_index"])
            logits = self.network.logits(chosen)
        return F.cross_entropy(logits.float(), batch["loss_target"], ignore_index=-1)


def figures(network: Network, problems: list[Problem], encoder: TextEncoder) -> dict[str, object]:
    """Return accuracy and forwards of every decoding, with and without the length cut, and the weak templates."""
    report: dict[str, object] = {}
    for name, settings in _DECODINGS.items():
        began = time.monotonic()
        outcomes = evaluate(network, problems, encoder, settings)
        kept = [outcome for outcome in outcomes if not outcome.is_cut]
        report[name] = {
            "with length cut": summarise(kept or outcomes).as_dict(),
            "without length cut": summarise(outcomes).as_dict(),
            "by template": {template: list(counts) for template, counts in by_template(outcomes).items()},
            "first wrong answers": [_shown(outcome) for outcome in outcomes if not outcome.is_correct][:40],
        }
        logger.info("%s: %s (%.0f s)", name, summarise(kept or outcomes).as_dict(), time.monotonic() - began)
    return report


def main(arguments: list[str] | None = None) -> None:
    """Train, save and measure, as the command line says."""
    options = _parser().parse_args(arguments)
    setup_logger("INFO")
    recipe = RECIPES[options.recipe]
    if options.seconds is not None:
        recipe = dataclasses.replace(recipe, seconds=options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_workers = options.workers if options.workers is not None else max(0, (os.cpu_count() or 1) - 3)
    torch.manual_seed(recipe.seed)
    encoder = make_encoder(recipe) if options.tokenizer is None else TextEncoder.load(options.tokenizer)
    network = Network(recipe.shape).to(device)
    if options.continue_from:
        load_weights(network, options.continue_from)
    logger.info("%s: %d weights on %s", recipe.name, sum(p.numel() for p in network.parameters()), device)
    span = Span(*options.span)
    curve = train(network, recipe, encoder, num_workers, span, options.first_seed)
    options.output.mkdir(parents=True, exist_ok=True)
    save_checkpoint(network, recipe, encoder, options.output)
    if options.save_exact:
        save_exact_weights(network, options.output)
    report: dict[str, object] = {
        "recipe": dataclasses.asdict(recipe),
        "span": dataclasses.asdict(span),
        "curve": [dataclasses.asdict(point) for point in curve],
    }
    _write_report(report, options.output)
    # The figures are those of the saved weights, so the network takes them back, computing in float32.
    measured = Network(recipe.shape).to(device)
    load_weights(measured, [options.output / "model.safetensors"])
    measured.eval()
    for name, problems in (
        ("validation", validation_problems(options.num_validation, length_cut=False)),
        ("test", test_problems(options.num_test, length_cut=False)),
    ):
        if problems:
            report[name] = figures(measured, problems, encoder)
            _write_report(report, options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diffulex_bench.tiny.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint and training.json")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="sdar", help="what to train")
    parser.add_argument("--seconds", type=float, help="training time in seconds; the recipe's when left out")
    parser.add_argument("--workers", type=int, help="batch processes; all cores but three when left out")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; trained when left out")
    parser.add_argument("--continue-from", type=Path, nargs="+", help="weight files to start from")
    parser.add_argument("--first-seed", type=int, help="seed of the first batch process, to continue with fresh data")
    parser.add_argument("--span", type=float, nargs=2, default=(0.0, 1.0), help="part of the rate's course to run")
    parser.add_argument("--save-exact", action="store_true", help="also write float32 weights to continue from")
    parser.add_argument("--num-validation", type=int, default=0, help="validation problems to measure")
    parser.add_argument("--num-test", type=int, default=1000, help="test problems to measure")
    return parser


def _shown(outcome: Outcome) -> dict[str, object]:
    return {
        "template": outcome.problem.template,
        "question": outcome.problem.question,
        "text": outcome.text,
        "answer": outcome.problem.answer,
    }


def _write_report(report: dict[str, object], folder: Path) -> None:
    (folder / "training.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
