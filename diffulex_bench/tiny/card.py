"""The model card of a trained checkpoint, written from its ``training.json``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffulex_bench.tiny.data import MAX_ANSWER_TOKENS, MAX_ROW_TOKENS, TEST_SEED, VALIDATION_SEED
from diffulex_bench.tiny.recipe import RECIPES, Recipe

_NUM_CURVE_ROWS = 14

_TEXT = """\
# tiny-{name}: a small block-diffusion model for grade-school problems

{num_weights:,} weights in the published layout of SDAR (a dense Qwen3-like decoder, no logit shift), block
size {block_size}, bfloat16. It exists to try the engine and the benchmark on a CPU in minutes. It solves the
generated problems below and nothing else.

Prompt: the question and one newline. Answer: a worked solution whose last line is `#### number`, then the end
token.

## Data

* Problems of `gsm_symbolic` from the `reasoning-gym` package (85 templates, difficulty 1.0), made while
  training.
* Split by a checksum of the question's text: 1/16 test, 1/16 validation, the rest training. So no test
  question can occur in training, whatever the seeds. Seeds: training {seed} to {last_seed} (one a batch
  process), validation {validation_seed}, test {test_seed}.
* Training texts write long sums and hard products in small steps (`9 * 92 = 810 + 18 = 828`; `solutions.py`).
  Words, results and the last line are the generator's. Answers are about a tenth longer than the published
  solutions, which raises tokens per forward; forwards per problem are given beside it.
* Templates drawn more often than the others: {weights}. Chosen on validation problems after a first run of
  110 s; the test split was not looked at.
* Byte-level BPE tokenizer, {vocab_size} entries, every digit one token; end of text 0, mask 1, padding 2.

## Training

* Each problem: its clean text and two noisy copies. In one copy every block stands alone; in the other two to
  {max_group} consecutive blocks see each other, later ones at least as noisy, so that decoding with several
  open blocks is in distribution. Loss: mean cross-entropy over the masked answer tokens.
* Muon for matrices (rate {matrix_rate}), AdamW for the rest (rate {other_rate}), cosine course, bfloat16
  autocast, {tokens:,} tokens a step.
* {steps:,} steps, about {problems:,} problems, {seconds:.0f} s on one {device}, compilation not counted.

| step | seconds | loss |
|---|---|---|
{curve}

Train it again with one command on a machine with a CUDA device and several cores:

```
python -m diffulex_bench.tiny.train --output DIR
```

The course follows the clock, so another run does another number of steps and gives other weights.

## Results

Greedy, on distinct problems (seeds above), full recompute in float32 of the saved weights. TPF is answer
tokens with the end token over denoising forwards; no prefill and no store-only forward is counted. The
length cut drops problems whose row exceeds {max_row} tokens or whose answer part exceeds {max_answer}
(published solution).

| split | decoding | problems | accuracy, 95 % | TPF | forwards | no number | unfinished |
|---|---|---|---|---|---|---|---|
{results}

Templates solved least often in the test (single block): {weak}.

## Limits

* Training and test share their 85 templates: a test question differs from every training question in a name,
  a thing or a number, never in kind. This is no measure of mathematical skill and must not be compared with
  models tested on GSM8K.
* The texts are templated, so almost all words are certain and TPF is far higher than that of real models.
{notes}"""


def write_card(folder: Path) -> None:
    """Write ``README.md`` of a checkpoint folder that holds a ``training.json``."""
    report = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(card_text(report), encoding="utf-8")


def card_text(report: Mapping[str, Any]) -> str:
    """Return the card of a training report."""
    recipe = RECIPES[report["recipe"]["name"]]
    curve = report["curve"]
    return _TEXT.format(
        name=recipe.name,
        num_weights=_num_weights(recipe),
        block_size=recipe.noise.block_size,
        seed=recipe.seed,
        last_seed=recipe.seed + max(0, report["num_workers"] - 1),
        validation_seed=VALIDATION_SEED,
        test_seed=TEST_SEED,
        weights=_weights(recipe),
        vocab_size=recipe.shape.vocab_size,
        max_group=recipe.noise.max_group,
        matrix_rate=recipe.optimisation.matrix_rate,
        other_rate=recipe.optimisation.other_rate,
        tokens=recipe.pack_length * recipe.packs_per_step,
        steps=curve[-1]["step"],
        problems=round(curve[-1]["num_problems"], -3),
        seconds=curve[-1]["seconds"],
        device=report["device"],
        curve="\n".join(f"| {p['step']} | {p['seconds']:.0f} | {p['loss']:.4f} |" for p in _thinned(curve)),
        max_row=MAX_ROW_TOKENS,
        max_answer=MAX_ANSWER_TOKENS,
        results="\n".join(_result_rows(report)),
        weak=_weak(report),
        notes="".join(f"* {note}\n" for note in report.get("notes", ())),
    )


def _num_weights(recipe: Recipe) -> int:
    shape = recipe.shape
    heads = 2 * (shape.num_heads + shape.num_kv_heads)
    attention = shape.hidden_size * shape.head_dim * heads + 2 * shape.head_dim
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    return shape.vocab_size * shape.hidden_size + shape.num_layers * layer + shape.hidden_size


def _weights(recipe: Recipe) -> str:
    templates_of: dict[float, list[int]] = {}
    for template, weight in recipe.template_weights.items():
        templates_of.setdefault(weight, []).append(template)
    parts = [
        f"{', '.join(map(str, templates))} ({weight} times)" for weight, templates in templates_of.items()
    ]
    return "; ".join(parts) or "none"


def _thinned(curve: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first, the last and evenly spaced points between."""
    last = len(curve) - 1
    count = min(_NUM_CURVE_ROWS, len(curve))
    return [curve[round(index * last / max(1, count - 1))] for index in range(count)]


def _result_rows(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for split in ("test", "validation"):
        for decoding, results in report[split].items():
            for cut in ("with length cut", "without length cut"):
                figures = results[cut]
                accuracy = f"{100 * figures['accuracy']:.1f} +- {100 * figures['half_interval']:.1f}"
                rows.append(
                    f"| {split}, {cut} | {decoding} | {figures['num_problems']} | {accuracy} "
                    f"| {figures['tpf']:.2f} | {figures['forwards_per_problem']:.2f} "
                    f"| {100 * figures['no_number']:.1f} % | {100 * figures['unfinished']:.1f} % |"
                )
    return rows


def _weak(report: Mapping[str, Any]) -> str:
    counts = next(iter(report["test"].values()))["by template"]
    worst = sorted(counts.items(), key=lambda entry: entry[1][0] / entry[1][1])[:5]
    return ", ".join(f"{template} ({correct} of {total})" for template, (correct, total) in worst)
