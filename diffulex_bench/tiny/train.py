"""Train a tiny model: ``python -m diffulex_bench.tiny.train --output DIR``, minutes on one GPU.

Writes a complete checkpoint folder with a model card, and ``training.json`` with the loss curve and the
figures on held-out problems. ``--recipe smoke`` runs on a CPU in seconds and only shows that everything
works.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from diffulex.logger import get_logger, setup_logger
from diffulex_bench.tiny.card import write_card
from diffulex_bench.tiny.checkpoint import load_weights, save_checkpoint
from diffulex_bench.tiny.data import Problem, problem_stream, test_problems, validation_problems
from diffulex_bench.tiny.decode import DecodeSettings
from diffulex_bench.tiny.evaluate import by_template, evaluate, summarise
from diffulex_bench.tiny.feed import batch_loader, training_text
from diffulex_bench.tiny.network import Network, Visibility, block_visibility, dense_visibility
from diffulex_bench.tiny.optimiser import make_optimisers, rate_factor
from diffulex_bench.tiny.recipe import RECIPES, Recipe
from diffulex_bench.tiny.tokenizer import TextEncoder, train_tokenizer

logger = get_logger("diffulex_bench.tiny.train")

_LOG_EVERY = 100
_DECODINGS = {
    "single block, accept 0.9": DecodeSettings(),
    "multi, buffer 4, accept 0.9": DecodeSettings(buffer_size=4),
}


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean loss of the steps since the last point, after so many seconds and problems of training."""

    step: int
    seconds: float
    num_problems: int
    loss: float


def make_encoder(recipe: Recipe) -> TextEncoder:
    """Return the recipe's tokenizer, trained on the first problems of its training stream."""
    problems = list(islice(problem_stream("train", recipe.seed), recipe.tokenizer_problems))
    texts = (text for problem in problems for text in (problem.prompt, training_text(problem, recipe)))
    return train_tokenizer(texts, recipe.shape.vocab_size)


def train(network: Network, recipe: Recipe, encoder: TextEncoder, num_workers: int) -> list[LossPoint]:
    """Train the network in place, on the device it is on, and return its loss curve.

    Args:
        network: Fresh, or with weights to continue from.
        recipe: What to train.
        encoder: The recipe's tokenizer.
        num_workers: Processes that make batches; 0 makes them in this process.
    """
    device = network.model.embed_tokens.weight.device
    is_cuda = device.type == "cuda"
    optimisers = make_optimisers(network, recipe.optimisation)
    loss_of = _Objective(network, is_cuda)
    curve: list[LossPoint] = []
    total = torch.zeros((), device=device)
    num_problems = 0
    began = time.monotonic()
    log_every = min(_LOG_EVERY, max(1, recipe.max_steps // 10))
    network.train()
    for step, batch in enumerate(batch_loader(recipe, encoder, num_workers, is_cuda)):
        progress = max((time.monotonic() - began) / recipe.seconds, step / recipe.max_steps)
        if progress >= 1.0:
            break
        num_problems += int(batch.pop("num_problems"))
        loss = loss_of({name: part.to(device, non_blocking=True) for name, part in batch.items()})
        loss.backward()  # type: ignore[no-untyped-call]
        _update(optimisers, rate_factor(recipe.optimisation, step, progress))
        total += loss.detach()
        if step == 0:
            began = time.monotonic()  # the first step compiles, which is no training time
        if step == 0 or (step + 1) % log_every == 0:
            num_steps = step + 1 - (curve[-1].step if curve else 0)
            seconds = time.monotonic() - began
            curve.append(LossPoint(step + 1, round(seconds, 1), num_problems, float(total) / num_steps))
            logger.info("step %d, %.1f s, loss %.4f", step + 1, seconds, curve[-1].loss)
            total.zero_()
    network.eval()
    return curve


def figures(network: Network, problems: Sequence[Problem], encoder: TextEncoder) -> dict[str, object]:
    """Return accuracy and forwards of every decoding, with and without the length cut and by template."""
    report: dict[str, object] = {}
    for name, settings in _DECODINGS.items():
        outcomes = evaluate(network, problems, encoder, settings)
        kept = [outcome for outcome in outcomes if not outcome.is_cut]
        report[name] = {
            "with length cut": summarise(kept or outcomes).as_dict(),
            "without length cut": summarise(outcomes).as_dict(),
            "by template": {template: list(counts) for template, counts in by_template(outcomes).items()},
        }
        logger.info("%s: %s", name, summarise(outcomes))
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save and measure, as the command line says."""
    options = _parser().parse_args(arguments)
    setup_logger("INFO")
    recipe = RECIPES[options.recipe]
    if options.seconds is not None:
        recipe = dataclasses.replace(recipe, seconds=options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_workers = options.workers if options.workers is not None else max(0, (os.cpu_count() or 1) - 3)
    torch.manual_seed(recipe.seed)
    encoder = make_encoder(recipe)
    network = Network(recipe.shape).to(device)
    logger.info("%s: %d weights on %s", recipe.name, sum(p.numel() for p in network.parameters()), device)
    curve = train(network, recipe, encoder, num_workers)
    save_checkpoint(network, recipe, encoder, options.output)
    report: dict[str, object] = {
        "recipe": dataclasses.asdict(recipe),
        "num_workers": num_workers,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "curve": [dataclasses.asdict(point) for point in curve],
    }
    # The figures are those of the saved bfloat16 weights, computing in float32 without compilation.
    measured = Network(recipe.shape).to(device).eval()
    load_weights(measured, options.output)
    report["validation"] = figures(
        measured, validation_problems(options.num_problems, length_cut=False), encoder
    )
    report["test"] = figures(measured, test_problems(options.num_problems, length_cut=False), encoder)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (options.output / "training.json").write_text(f"{text}\n", encoding="utf-8")
    write_card(options.output)


class _Objective:
    """Mean cross-entropy over the masked answer tokens of a batch; compiled, in bfloat16 on a CUDA device."""

    def __init__(self, network: Network, is_cuda: bool) -> None:
        self.network = network
        self.is_cuda = is_cuda
        self.visibility = torch.compile(block_visibility) if is_cuda else dense_visibility
        if is_cuda:
            for layer in network.model.layers:
                layer.compile(dynamic=False)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        parts = (batch[name] for name in ("problem", "block", "group", "clean_end"))
        visible: Visibility = self.visibility(*parts)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_cuda):
            hidden = self.network(batch["ids"], batch["positions"], visible)
            chosen = hidden.flatten(0, 1).index_select(0, batch["loss_index"])
            logits = self.network.logits(chosen)
        return F.cross_entropy(logits.float(), batch["loss_target"], ignore_index=-1)


def _update(optimisers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Do one step of every optimiser at ``factor`` times its full rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["full_rate"] * factor
        optimiser.step()
        optimiser.zero_grad()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diffulex_bench.tiny.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="sdar", help="what to train")
    parser.add_argument("--seconds", type=float, help="training time in seconds; the recipe's when left out")
    parser.add_argument("--workers", type=int, help="batch processes; all cores but three when left out")
    parser.add_argument(
        "--num-problems", type=int, default=2000, help="validation and test problems to measure"
    )
    return parser


if __name__ == "__main__":
    main()
