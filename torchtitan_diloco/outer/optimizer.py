"""Outer optimizers: how a merged delta moves the anchor.

Every operation is elementwise, a separate multiplication or addition in a fixed order, so that all islands get the same
bits on any CPU and with any number of threads (a fused multiply-add, or ``add_(x, alpha=...)``, would not).
"""

from dataclasses import dataclass

import torch


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
        Returns the new anchor and momentum in new storage: whoever reads the old version (a heal in progress) keeps it.
        """
        if not self.keeps_momentum:
            update = delta * self.lr
            return torch.sub(anchor, update, out=update), None
        if momentum is None:
            momentum = torch.zeros_like(anchor)
        velocity = momentum * self.momentum
        velocity += delta
        update = velocity * self.momentum if self.nesterov else velocity.clone()
        if self.nesterov:
            update += delta
        update *= self.lr
        return torch.sub(anchor, update, out=update), velocity
