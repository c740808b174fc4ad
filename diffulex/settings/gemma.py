"""Settings of DiffusionGemma's canvas sampler; the checkpoint's generation_config.json replaces defaults."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["GemmaSettings"]


@dataclass(frozen=True)
class GemmaSettings:
    """Canvas denoising, read when model_name is diffusion_gemma."""

    diffusion_gemma_max_denoising_steps: int = setting(48, help="Most denoising steps of a canvas.", low=1)
    diffusion_gemma_stability_threshold: int = setting(
        2, help="Steps before that must agree with the current one.", low=1
    )
    diffusion_gemma_confidence_threshold: float = setting(
        0.1, help="A canvas is done when its mean entropy is below this.", low=0, high=1
    )
    diffusion_gemma_t_min: float = setting(0.0, help="Last temperature of the schedule.", low=0)
    diffusion_gemma_t_max: float = setting(1.0, help="First temperature of the schedule.", low=0)
    diffusion_gemma_entropy_bound: float = setting(
        1.0, help="Summed entropy up to which positions are kept in a step.", low=0, high=1
    )
