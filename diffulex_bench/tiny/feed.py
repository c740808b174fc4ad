"""The stream of packed training batches, made by worker processes beside the training."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from diffulex_bench.tiny.data import Problem, problem_stream, template_ids
from diffulex_bench.tiny.recipe import Recipe
from diffulex_bench.tiny.rows import Tokens, pack, training_row
from diffulex_bench.tiny.solutions import spell_out
from diffulex_bench.tiny.tokenizer import TextEncoder

# Masked tokens are about a quarter of a batch; the loss looks at this share at most.
_TARGET_SHARE = 0.4


def training_text(problem: Problem, recipe: Recipe) -> str:
    """Return the solution as the recipe trains it."""
    return spell_out(problem.solution) if recipe.small_steps else problem.solution


def training_batches(recipe: Recipe, encoder: TextEncoder, seed: int) -> Iterator[Tokens]:
    """Yield packed batches without end; the same recipe, encoder and seed give the same batches."""
    weights = [recipe.template_weights.get(template, 1.0) for template in template_ids()]
    random = np.random.default_rng(seed)

    def rows() -> Iterator[Tokens]:
        for problem in problem_stream("train", seed, weights):
            prompt, answer = encoder.encode(problem.prompt), encoder.encode(training_text(problem, recipe))
            yield training_row(prompt, answer, recipe.noise, random)

    return pack(rows(), recipe.pack_length, recipe.packs_per_step)


def as_tensors(batch: Tokens) -> dict[str, Tensor]:
    """Return a batch as tensors, with the places where the loss counts as flat indices of a fixed number.

    ``loss_index`` points into the flattened batch, ``loss_target`` holds the true tokens; unused entries have
    target -1. ``num_problems`` counts the problems in the batch.
    """
    ids = torch.from_numpy(batch.ids)
    targets = batch.targets.reshape(-1)
    # Places with a target come first. Distinct places keep the gradient of the gather free of conflicts.
    index = np.argsort(targets < 0, kind="stable")[: int(_TARGET_SHARE * targets.size)]
    target = targets[index].astype(np.int64)
    return {
        "ids": ids,
        "positions": torch.from_numpy(batch.positions),
        "problem": torch.from_numpy(batch.problem),
        "block": torch.from_numpy(batch.block),
        "group": torch.from_numpy(batch.group),
        "clean_end": torch.from_numpy(batch.clean_end),
        "loss_index": torch.from_numpy(index),
        "loss_target": torch.from_numpy(target),
        "num_problems": torch.tensor(int((batch.problem.max(axis=1) + 1).sum())),
    }


class _Batches(IterableDataset[dict[str, Tensor]]):
    """Batches of one worker process; workers differ in their seed only."""

    def __init__(self, recipe: Recipe, encoder_json: str) -> None:
        self.recipe = recipe
        self.encoder_json = encoder_json

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        from tokenizers import Tokenizer

        worker = get_worker_info()
        seed = self.recipe.seed + (worker.id if worker is not None else 0)
        encoder = TextEncoder(Tokenizer.from_str(self.encoder_json))
        return map(as_tensors, training_batches(self.recipe, encoder, seed))


def batch_loader(
    recipe: Recipe, encoder: TextEncoder, num_workers: int, pin: bool
) -> "DataLoader[dict[str, Tensor]]":
    """Return the loader that the training reads; worker i draws with the recipe's seed + i."""
    return DataLoader(
        _Batches(recipe, encoder.tokenizer.to_str()),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin,
        prefetch_factor=4 if num_workers else None,
    )
