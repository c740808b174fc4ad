"""Decoding thresholds, as flat settings and as the object `DecodingThresholds`."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["DecodingThresholds", "ThresholdSettings"]

_ONE_BLOCK = "no effect with buffer_size 1; noted, not refused, so that sweeps over buffer_size work"


@dataclass(frozen=True)
class DecodingThresholds:
    """When blocks open and tokens are accepted; all are shares or probabilities from 0 to 1."""

    add_block_threshold: float = setting(
        0.1,
        help=f"Filled share of the last block from which the next one opens; {_ONE_BLOCK}.",
        low=0,
        high=1,
    )
    semi_complete_threshold: float = setting(
        0.9,
        help=f"Filled share of a block from which the block behind may be forced to fill; {_ONE_BLOCK}.",
        low=0,
        high=1,
    )
    accept_threshold: float = setting(
        0.9,
        help="A masked position takes its token, drawn or most probable (of equal logits the lowest id), "
        "when the token's probability is above this; another stays masked unless it is the one the block is "
        "forced to fill. Probability is the softmax over the whole vocabulary at temperature 1, before "
        "top_p and top_k, in float32.",
        low=0,
        high=1,
    )
    edit_threshold: float = setting(
        0.0,
        help="edit: a filled position takes another token when its probability is above this.",
        low=0,
        high=1,
    )
    remask_threshold: float = setting(
        0.4, help="enable_remasking: a filled position below this probability is masked again.", low=0, high=1
    )
    token_stability_threshold: float = setting(
        0.0,
        help="Share of its tokens that the last sampling of a block must have confirmed before the next one "
        f"opens; a naive sampler confirms a block when it is complete, so any value above 0 waits for that; "
        f"{_ONE_BLOCK}.",
        low=0,
        high=1,
    )


_DEFAULTS = DecodingThresholds()


@dataclass(frozen=True)
class ThresholdSettings(DecodingThresholds):
    """The flat thresholds, and the object that holds all of them."""

    decoding_thresholds: DecodingThresholds = setting(  # noqa: RUF009 - `setting` makes a field, like `field`
        _DEFAULTS,
        help="All thresholds in one object or mapping; a flat threshold beside it must not disagree.",
        flag=False,
    )
