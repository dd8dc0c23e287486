"""The delta, or pseudo-gradient: how far an island has moved from the anchor."""

import torch

from torchtitan_diloco.outer.fragments import Fragment


def pseudo_gradient(fragment: Fragment, anchor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The delta: anchor minus local parameters, float32, 1-D, in the memory of ``local``.

    Where the island trains in a lower precision, its parameters started from the rounded anchor; the delta counts from
    there, or each slot would pull the anchor towards its own rounding.
    """
    if all(piece.spec.dtype.itemsize >= anchor.dtype.itemsize for piece in fragment.pieces):
        return torch.sub(anchor, local, out=local)
    for piece in fragment.pieces:
        start, here = anchor[piece.slice], local[piece.slice]
        if piece.spec.dtype.itemsize < anchor.dtype.itemsize:
            start = start.to(piece.spec.dtype).to(anchor.dtype)
        torch.sub(start, here, out=here)
    return local
