"""Outer optimizers: how a merged delta moves the anchor.

Every operation is elementwise, a separate multiplication or addition in a fixed order, so that all islands get the same
bits on any CPU and with any number of threads (a fused multiply-add, or ``add_(x, alpha=...)``, would not).
"""

from dataclasses import dataclass

import torch

from torchtitan_diloco.outer import buffers

PIECE = 1 << 18
"""Values that a thread works on at a time: what it needs of them stays in the caches."""


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """SGD with (Nesterov) momentum on the anchor (DiLoCo, arXiv 2311.08105, Algorithm 1; as torch.optim.SGD orders it).

    v' = mu v + delta;  u = mu v' + delta (Nesterov) or v';  theta' = theta - lr u

    ``lr=1, momentum=0`` is local SGD: theta' is then the weighted mean of the islands' parameters.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def keeps_momentum(self) -> bool:
        return self.momentum != 0.0

    def step(
        self, anchor: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One outer step.

        anchor, delta, momentum: 1-D, same length and dtype; momentum is None at the first step or when none is kept.
        Returns the new anchor and momentum; the old ones stay as they are, since a heal in progress may read them. The
        delta is used up: its memory becomes the momentum's.
        """
        new = buffers.empty(anchor.numel(), anchor.dtype)
        length = PIECE * torch.get_num_threads()
        scratch = torch.empty(min(length, anchor.numel()), dtype=anchor.dtype)
        for start in range(0, anchor.numel(), length):
            here = slice(start, start + length)
            old = None if momentum is None else momentum[here]
            self._step(anchor[here], delta[here], old, new[here], scratch[: new[here].numel()])
        return new, delta if self.keeps_momentum else None

    def _step(
        self,
        anchor: torch.Tensor,
        delta: torch.Tensor,
        momentum: torch.Tensor | None,
        new: torch.Tensor,
        velocity: torch.Tensor,
    ) -> None:
        """A piece of it. new: becomes the anchor. delta: becomes the momentum. velocity: scratch."""
        if not self.keeps_momentum:
            torch.mul(delta, self.lr, out=new)
        else:
            if momentum is None:
                velocity.zero_()
            else:
                torch.mul(momentum, self.momentum, out=velocity)
            velocity += delta
            if self.nesterov:
                torch.mul(velocity, self.momentum, out=new)
                new += delta
                new *= self.lr
            else:
                torch.mul(velocity, self.lr, out=new)
            delta.copy_(velocity)
        torch.sub(anchor, new, out=new)
