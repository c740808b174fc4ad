"""Settings of the decoding loop: strategy, blocks, limits, and accelerations that keep the tokens."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["DecodingSettings"]


@dataclass(frozen=True)
class DecodingSettings:
    """How masked blocks become text."""

    decoding_strategy: str = setting(
        "d2f", help="Request, scheduler, cache and runner in use; unset takes the model family's own."
    )
    sampling_mode: str = setting(
        "naive", help="naive fills masks; edit also changes filled tokens.", choices=("naive", "edit")
    )
    block_size: int = setting(
        32,
        help="Tokens in one diffusion block; unset, multi_bd and dmax take the one the checkpoint was "
        "trained with, where its config.json or its family says so.",
        choices=(4, 8, 16, 32, 256),
    )
    buffer_size: int = setting(4, help="Blocks of one request that may be open at once.", low=1)
    multi_block_prefix_full: bool = setting(
        True, help="The prompt sees itself in full instead of block by block; every strategy forces its own."
    )
    d2f_block_origin: str = setting(
        "prompt",
        help="d2f: blocks start behind the prompt, or on multiples of block_size.",
        choices=("prompt", "grid"),
    )
    d2f_reuse_prompt: bool = setting(True, help="d2f: keep the cache of a whole prompt for equal prompts.")
    enable_remasking: bool = setting(
        False, help="Mask filled positions again whose probability falls below remask_threshold."
    )
    auto_max_nfe: bool = setting(
        False, help="End requests that stand still, judged by the two settings below."
    )
    auto_max_nfe_warmup_steps: int = setting(
        8,
        help="auto_max_nfe: a request ends as stalled after this many denoising forward passes in a row that "
        "filled nothing; after this many in all it is also held to auto_max_nfe_tpf_floor.",
        low=1,
    )
    auto_max_nfe_tpf_floor: float = setting(
        1.0,
        help="auto_max_nfe: once warm, a request whose filled positions per denoising forward pass stay "
        "below this ends as stalled.",
        above=0,
    )
    seed: int = setting(0, help="Base of the seeds of requests that bring none.", low=0, high=2**63 - 1)
    activate_in_prefill: bool = setting(
        True, help="Open the first answer block inside the prompt's forward pass."
    )
    overlap_store: bool = setting(
        True,
        help="Denoise the next block in the forward pass that stores the finished one; no effect with "
        "buffer_size above 1; noted, not refused, so that sweeps over buffer_size work.",
    )
    early_eos_stop: bool = setting(
        True, help="End once all positions before the first EOS are filled, and drop the blocks behind."
    )
    skip_final_store: bool = setting(
        True, help="Leave out the forward pass that stores a request's last block."
    )
    skip_dummy_blocks: bool = setting(True, help="Leave blocks that are not open out of the forward pass.")
    needed_logits_only: bool = setting(True, help="Compute logits only for rows that the sampler reads.")
    save_trace: bool = setting(False, help="Record what each forward pass did to a request in its output.")
