"""Settings of the scheduler: lengths, token budget, requests at once."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["SchedulingSettings"]


@dataclass(frozen=True)
class SchedulingSettings:
    """How much runs at once."""

    max_model_len: int = setting(
        2048, help="Most tokens of prompt and answer together; the checkpoint may lower it.", low=1
    )
    max_num_batched_tokens: int = setting(
        4096, help="Tokens in one forward pass; at least max_model_len.", low=1
    )
    max_num_reqs: int = setting(128, help="Requests that run at once.", low=1)
