"""Request of `multi_bd`."""

from diffulex.engine.request import AutoReq, MultiBlockReqTemplate


@AutoReq.register("multi_bd")
class MultiBDReq(MultiBlockReqTemplate):
    """Blocks on the absolute grid, block-causal everywhere: the template's own rules."""
