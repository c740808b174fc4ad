"""Model runner of `multi_bd`."""

from diffulex.engine.model_runner import AutoModelRunner, MultiBlockModelRunnerTemplate
from diffulex.strategy.multi_bd.attention.metadata import SLOT


@AutoModelRunner.register("multi_bd")
class MultiBDModelRunner(MultiBlockModelRunnerTemplate):
    """A finished block is stored once, from its final tokens, and never recomputed."""

    attn_metadata = SLOT
