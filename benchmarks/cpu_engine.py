"""The engine against a plain loop that recomputes everything, over the same weights on the CPU.

The plain loop is what one writes in an afternoon: one request at a time, every forward runs the model over
the whole text so far, no cache. Both decode the same prompts to the same tokens (checked) with `multi_bd`.

    python benchmarks/cpu_engine.py [--num-prompts 8] [--max-tokens 256] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

from diffulex import Diffulex, SamplingParams
from diffulex.attention.metadata import AttnMetaDataBase, MetadataSlot, set_fetch_fn_for_attn_metadata
from diffulex_bench.tiny import bundled_model
from diffulex_bench.tiny.data import test_problems

if TYPE_CHECKING:
    from diffulex.model.decoder import DiffusionLM

SLOT = MetadataSlot(AttnMetaDataBase)
BLOCK_SIZE = 16


@torch.inference_mode()
def recompute_loop(llm: Diffulex, prompt: list[int], max_tokens: int, accept: float) -> list[int]:
    """One open block at a time, the whole text through the model in every forward."""
    model: DiffusionLM = llm.runner.model
    mask, limit, ids = llm.config.mask_token_id, len(prompt) + max_tokens, list(prompt)
    for start in range(len(prompt) // BLOCK_SIZE * BLOCK_SIZE, limit, BLOCK_SIZE):
        ids += [mask] * (start + BLOCK_SIZE - len(ids))
        is_open = torch.arange(len(ids)) >= max(start, len(prompt))
        while is_open.any():
            places = torch.nonzero(is_open)[:, 0]
            logits = full_logits(model, ids)[places]
            probs = logits.softmax(-1)
            logits[:, mask] = float("-inf")
            logits[:, llm.config.vocab_limit :] = float("-inf")
            token = logits.argmax(-1)
            conf = probs.gather(1, token[:, None])[:, 0]
            take = conf > accept
            if not take.any():
                take[conf.argmax()] = True
            for place, value in zip(places[take].tolist(), token[take].tolist(), strict=True):
                ids[place] = value
            is_open[places[take]] = False
    return ids[len(prompt) : limit]


def full_logits(model: DiffusionLM, ids: list[int]) -> torch.Tensor:
    """Logits of every position, nothing cached."""
    set_fetch_fn_for_attn_metadata(SLOT.fetch)
    length = len(ids)
    SLOT.set(
        cu_q_lens=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.zeros(1, dtype=torch.int32),
        page_tables=torch.empty(1, 0, dtype=torch.int32),
        slot_mapping=torch.full((length,), -1),
        visible_ends=((torch.arange(length) // BLOCK_SIZE + 1) * BLOCK_SIZE).to(torch.int32),
        page_size=BLOCK_SIZE,
    )
    return model.compute_logits(model(torch.tensor(ids), torch.arange(length))).float()


def main() -> None:
    """Prints tokens per second of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--accept-threshold", type=float, default=0.9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = SamplingParams(0.0, args.max_tokens, ignore_eos=True)
    with Diffulex(
        str(bundled_model("tiny-sdar")),
        model_name="sdar",
        decoding_strategy="multi_bd",
        tensor_parallel_size=1,
        block_size=BLOCK_SIZE,
        page_size=BLOCK_SIZE,
        buffer_size=1,
        accept_threshold=args.accept_threshold,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [llm.encode(problem.question + "\n") for problem in test_problems(args.num_prompts)]
        llm.generate(prompts[:1], params)
        recompute_loop(llm, prompts[0], 32, args.accept_threshold)

        start = time.perf_counter()
        plain = [recompute_loop(llm, prompt, args.max_tokens, args.accept_threshold) for prompt in prompts]
        plain_time = time.perf_counter() - start
        start = time.perf_counter()
        single = [llm.generate([prompt], params).trajectories[0].token_ids for prompt in prompts]
        single_time = time.perf_counter() - start
        together = llm.generate(prompts, params)
    assert single == plain, "the engine and the plain loop decoded different tokens"
    assert [output.token_ids for output in together.trajectories] == plain
    tokens = sum(len(one) for one in plain)
    print(f"{len(prompts)} prompts, {args.max_tokens} tokens each, {args.threads} threads, float32")
    rows = [
        ("plain recompute, one at a time", plain_time),
        ("engine, one at a time", single_time),
        (f"engine, {len(prompts)} together", together.wall_time),
    ]
    for name, seconds in rows:
        rate, ratio = tokens / seconds, plain_time / seconds
        print(f"{name:32} {seconds:7.2f} s {rate:8.0f} tokens/s  ratio {ratio:5.2f}x")


if __name__ == "__main__":
    main()
