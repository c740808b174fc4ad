"""Settings of samplers that edit or merge tokens, and of the sampler's form."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["EditSettings"]


@dataclass(frozen=True)
class EditSettings:
    """Edit sampling, DMax and token merge."""

    max_post_edit_steps: int = setting(16, help="edit: most steps a block is edited after it is full.", low=1)
    penalty_lambda: float = setting(
        0.0, help="edit: taken off the score of repeating the token before.", low=0
    )
    token_merge_mode: str = setting(
        "dmax_topk", help="dmax: how candidates are merged.", choices=("dmax_topk", "iter_smooth_topk")
    )
    token_merge_top_k: int = setting(1, help="dmax: candidates kept for a merged position.", low=1)
    token_merge_renormalize: bool = setting(
        True, help="dmax: rescale what is left after the choice of candidates."
    )
    token_merge_weight: float = setting(1.0, help="dmax: weight of the merged candidates.", low=0)
    dmax_sampler_fast_path: bool = setting(True, help="dmax: confidence of masked positions only.")
    dmax_force_prefill_active: bool = setting(False, help="dmax: run open blocks on the ragged path only.")
    enable_vectorized_sampler: bool = setting(
        False, help="The sampler is vectorised always; both values are the same."
    )
    enable_vectorized_sampler_compile: bool = setting(False, help="CUDA: compile the sampler.")
