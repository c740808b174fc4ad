"""One product a group of rows, each group with a matrix of its own; the choice of a form.

`reference.py` defines the meaning and is the form named ``naive``. A form for a device enters as another row
of `GEMM_FORMS`, named as in the setting ``moe_gemm_impl``.

Axes: N rows ordered by group, E groups, I input and O output width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from diffulex.moe.ops.grouped_gemm.reference import multiply_segments

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.moe.dispatch import Dispatch


class GroupedGemm(Protocol):
    """A form of the operation."""

    def __call__(self, x: Tensor, weights: Tensor, groups: Dispatch) -> Tensor:
        """``[N, I], [E, O, I] -> [N, O]``."""
        ...


def _naive(x: Tensor, weights: Tensor, groups: Dispatch) -> Tensor:
    return multiply_segments(x, weights, groups.segments)


GEMM_FORMS: dict[str, GroupedGemm] = {"naive": _naive}


def grouped_gemm(x: Tensor, weights: Tensor, groups: Dispatch, impl: str = "naive") -> Tensor:
    """Each row times the transposed matrix of its group.

    Args:
        x: ``[N, I]``, rows in the order of `groups`.
        weights: ``[E, O, I]``, of the dtype of `x`.
        groups: how many rows in turn belong to each of the E groups; a group may have none.
        impl: a name of `GEMM_FORMS`.

    Returns:
        ``[N, O]``; a row depends on its own input alone.

    Raises:
        ValueError: `impl` is not there.
    """
    if impl not in GEMM_FORMS:
        raise ValueError(f"moe_gemm_impl must be one of {', '.join(GEMM_FORMS)}, it is {impl!r}; use 'naive'")
    return GEMM_FORMS[impl](x, weights, groups)
