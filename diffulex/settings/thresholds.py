"""Decoding thresholds, as flat settings and as the object `DecodingThresholds`."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["DecodingThresholds", "ThresholdSettings"]


@dataclass(frozen=True)
class DecodingThresholds:
    """When blocks open and tokens are accepted; all are shares or probabilities from 0 to 1."""

    add_block_threshold: float = setting(
        0.1,
        help="Filled share of the last block from which the next one opens (buffer_size above 1).",
        low=0,
        high=1,
    )
    semi_complete_threshold: float = setting(
        0.9, help="Filled share of a block from which the block behind may be forced to fill.", low=0, high=1
    )
    accept_threshold: float = setting(
        0.9, help="A masked position takes its token when the probability is above this.", low=0, high=1
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
        0.0, help="edit: share of unchanged tokens a block needs before the next one opens.", low=0, high=1
    )


_DEFAULTS = DecodingThresholds()


@dataclass(frozen=True)
class ThresholdSettings(DecodingThresholds):
    """The flat thresholds, and the object that holds all of them."""

    decoding_thresholds: DecodingThresholds = setting(  # noqa: RUF009 - `setting` makes a field, like `field`
        _DEFAULTS,
        help="All thresholds in one object or mapping; a flat threshold written beside it wins.",
        flag=False,
    )
