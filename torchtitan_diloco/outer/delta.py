"""The delta, or pseudo-gradient: how far an island has moved from the anchor."""

import torch

from torchtitan_diloco.outer.digest import is_finite
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.pieces import pieces


def pseudo_gradient(
    fragment: Fragment, anchor: torch.Tensor, local: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """The delta: anchor minus local parameters, float32, 1-D, in the memory of ``local``; and whether all of it is finite.

    Where the island trains in a lower precision, its parameters started from the rounded anchor; the delta counts from
    there, or each slot would pull the anchor towards its own rounding.
    """
    finite, exact = True, anchor.dtype.itemsize
    stretches = [(piece.slice, piece.spec.dtype) for piece in fragment.pieces]
    if all(dtype.itemsize >= exact for _, dtype in stretches):
        stretches = [(slice(0, fragment.numel), anchor.dtype)]
    for stretch, dtype in stretches:
        for here in pieces(stretch):
            start, delta = anchor[here], local[here]
            if dtype.itemsize < exact:
                start = start.to(dtype).to(anchor.dtype)
            torch.sub(start, delta, out=delta)
            finite = finite and is_finite(delta)
    return local, finite
