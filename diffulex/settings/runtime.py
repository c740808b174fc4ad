"""Settings of the machine side: device, number format, attention backend, compilation, profiling."""

from collections.abc import Mapping
from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["RuntimeSettings"]


@dataclass(frozen=True)
class RuntimeSettings:
    """How forward passes are computed."""

    device: str = setting(
        "auto",
        help="Where the model runs; auto takes CUDA when there is any.",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = setting(
        "auto",
        help="Number format; auto is float32 on the CPU and the checkpoint's own on CUDA.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    attn_impl: str = setting(
        "triton_grouped", help="Attention backend.", choices=("triton_grouped", "triton", "naive")
    )
    enforce_eager: bool = setting(
        False, help="Run without graphs and compilation; this version has none, so True is refused."
    )
    enable_full_static_runner: bool = setting(True, help="Replay whole steps from CUDA graphs.")
    enable_torch_compile: bool = setting(True, help="Compile the model where that is safe.")
    torch_compile_mode: str = setting(
        "reduce-overhead",
        help="Mode handed to the compiler.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    enable_cudagraph_torch_compile: bool = setting(False, help="Compile the parts that CUDA graphs capture.")
    enable_prefill_cudagraph: bool = setting(False, help="Capture prefill steps in CUDA graphs.")
    prefill_cudagraph_max_len: int = setting(
        0, help="Most tokens of a captured prefill step; 0 finds it out.", low=0
    )
    enable_vllm_layers: bool = setting(True, help="Take common layers from vLLM when it is installed.")
    skip_warmup: bool = setting(
        False, help="Start without a warm-up forward pass; this version has none, so True is refused."
    )
    profiler_config: Mapping[str, object] | None = setting(
        None, help="Profiler options as a mapping (activities, schedule, ...); null profiles nothing."
    )
