"""Settings of mixture-of-experts layers."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["MoeSettings"]


@dataclass(frozen=True)
class MoeSettings:
    """How expert layers are computed and spread."""

    moe_gemm_impl: str = setting(
        "triton", help="Backend of the expert matrices.", choices=("triton", "vllm", "vllm_modular", "naive")
    )
    expert_parallel_size: int = setting(1, help="Groups that share the experts.", low=1, high=32768)
    moe_dispatcher_backend: str = setting(
        "standard", help="How tokens reach their experts.", choices=("standard", "naive", "deepep")
    )
    deepep_mode: str = setting(
        "auto", help="deepep: dispatch mode.", choices=("auto", "normal", "low_latency")
    )
    deepep_num_max_dispatch_tokens_per_rank: int = setting(
        256, help="deepep: most tokens of one rank.", low=1
    )
