"""`SamplingParams`: how one request is generated. A section of settings like the engine's."""

from dataclasses import dataclass

from diffulex.settings.spec import ConfigError, check_value, setting, settings_of

__all__ = ["FORCE_SCORES", "SamplingParams"]

#: What may rank the open positions of a block when its best one is filled; the first is the usual one.
FORCE_SCORES = ("prob", "margin", "neg_entropy")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, checked when made.

    Raises:
        ConfigError: a ValueError that names every field that cannot be used.
    """

    temperature: float = setting(
        1.0,
        help="0 takes the most probable token, of equal logits the lowest id; higher values draw more freely."
        " Only the draw sees the temperature: the confidence that accept_threshold is compared with is the "
        "chosen token's probability in the softmax over the whole vocabulary at temperature 1, before top_p "
        "and top_k, in float32. A drawn token whose confidence is not above the threshold is not accepted "
        "unless it is the one the block is forced to fill.",
        low=0,
        kw_only=False,
    )
    max_tokens: int = setting(256, help="Most tokens of an answer, kept exactly.", low=1, kw_only=False)
    max_nfe: int | None = setting(
        None, help="Most forward passes of a request, all kinds counted; null for no limit.", low=1
    )
    max_repetition_run: int | None = setting(
        None, help="An answer ends when one token stands this many times in a row; null for no limit.", low=1
    )
    trim_repetition_run: bool = setting(
        False, help="Cut the repeated tokens that ended an answer down to one of them."
    )
    ignore_eos: bool = setting(False, help="Go on after an end-of-sequence token.")
    top_p: float = setting(
        1.0, help="Draw from the most probable tokens that together reach this probability.", above=0, high=1
    )
    top_k: int = setting(0, help="Draw from this many most probable tokens; 0 means all.", low=0)
    seed: int | None = setting(
        None,
        help="Seed of this request's draws; null derives one from the engine's seed.",
        low=0,
        high=2**63 - 1,
    )
    confidence: str = setting(
        "prob",
        help="What ranks the positions of a block when its best one is filled: probability of the chosen "
        "token, its margin to the second, or negative entropy. Thresholds always compare the probability.",
        choices=FORCE_SCORES,
    )
    stop: tuple[str, ...] = setting((), help="Texts that end an answer; they are not part of it.")
    stop_token_ids: tuple[int, ...] = setting(
        (), help="Token ids that end an answer, beside the EOS ids.", low=0
    )
    stop_after: str | None = setting(
        None, help="Stop texts count only behind the first occurrence of this text, as with </think>."
    )

    cache_salt: str | None = setting(
        None, help="KV pages are shared only among requests with the same salt; null shares among all."
    )

    def __post_init__(self) -> None:
        problems = []
        for name, info in settings_of(SamplingParams).items():
            plain, wrong = check_value(info, getattr(self, name))
            if wrong is not None:
                problems.append(wrong)
            else:
                unique = tuple(dict.fromkeys(plain)) if isinstance(plain, tuple) else plain
                object.__setattr__(self, name, unique)
        if not problems and "" in self.stop:
            problems.append("stop must hold texts of at least one character, got ''; remove it")
        if not problems and self.stop_after == "":
            problems.append("stop_after must have at least one character, got ''; leave it unset")
        if not problems and self.trim_repetition_run and self.max_repetition_run is None:
            problems.append(
                "trim_repetition_run=True has no effect without max_repetition_run; set both or neither"
            )
        if problems:
            raise ConfigError(problems)
