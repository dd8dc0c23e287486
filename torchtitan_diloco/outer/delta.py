"""The delta, or pseudo-gradient: how far an island has moved from the anchor."""

import torch

from torchtitan_diloco.outer.digest import is_finite
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.values import Strung


class PseudoGradient:
    """Anchor minus local parameters, made as it is read (``Values``).

    finite: whether everything read so far is. Where the island trains in a lower precision, its parameters started from the
    rounded anchor; the delta counts from there, or each slot would pull the anchor towards its own rounding.
    """

    def __init__(self, fragment: Fragment, anchor: torch.Tensor, local: Strung) -> None:
        """anchor: 1-D, of the fragment's length. local: the present values."""
        self.numel, self.spare = local.numel, local.spare
        self.finite = True
        self._anchor, self._local = anchor, local
        exact = anchor.dtype.itemsize
        self._rounded = [(p.slice, p.spec.dtype) for p in fragment.pieces if p.spec.dtype.itemsize < exact]

    def read(self, here: slice, out: torch.Tensor) -> None:
        start = self._start(here)
        for place, values in self._local.parts(here):
            torch.sub(start[place], values, out=out[place])
        self.finite = self.finite and is_finite(out)

    def _start(self, here: slice) -> torch.Tensor:
        """What the parameters at ``here`` were when they were last set to the anchor."""
        start = self._anchor[here]
        if not self._rounded:
            return start
        start = start.clone()
        for stretch, dtype in self._rounded:
            low, high = max(stretch.start, here.start), min(stretch.stop, here.stop)
            if low < high:
                part = start[low - here.start : high - here.start]
                part.copy_(part.to(dtype))
        return start
