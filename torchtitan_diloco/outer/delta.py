"""The delta, or pseudo-gradient: how far an island has moved from the anchor."""

import torch

from torchtitan_diloco.outer.fragments import Fragment


def pseudo_gradient(fragment: Fragment, anchor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The delta: anchor minus local parameters, float32, 1-D.

    Where the island trains in a lower precision, its parameters started from the rounded anchor; the delta counts from
    there, or each slot would pull the anchor towards its own rounding.
    """
    delta = torch.sub(anchor, local)
    for piece in fragment.pieces:
        if piece.spec.dtype.itemsize < anchor.dtype.itemsize:
            start = anchor[piece.slice].to(piece.spec.dtype).to(anchor.dtype)
            torch.sub(start, local[piece.slice], out=delta[piece.slice])
    return delta
