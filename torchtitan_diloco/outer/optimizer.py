"""Outer optimizers: how a merged delta moves the anchor.

Every operation is elementwise, a separate multiplication or addition in a fixed order, so that all islands get the same
bits on any CPU and with any number of threads (a fused multiply-add, or ``add_(x, alpha=...)``, would not).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the outer lr falls over run progress: from all of it at slot 0 to ``least`` times it at the last of ``slots``."""

    shape: Shape = "constant"
    least: float = 1.0
    slots: int = 1

    def factor(self, slot: int) -> float:
        """Of the outer lr at a slot. Rounded, since mathematical libraries differ in the last bit of a cosine."""
        if self.shape == "constant":
            return 1.0
        done = min(1.0, slot / max(1, self.slots - 1))
        left = 1.0 - done if self.shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return round(self.least + (1.0 - self.least) * left, 9)


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """SGD with (Nesterov) momentum on the anchor (DiLoCo, arXiv 2311.08105, Algorithm 1; as torch.optim.SGD orders it).

    v' = mu v + delta;  u = mu v' + delta (Nesterov) or v';  theta' = theta - lr u

    ``lr=1, momentum=0`` is local SGD: theta' is then the weighted mean of the islands' parameters.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    schedule: Schedule = Schedule()

    def at(self, slot: int) -> "OuterSGD":
        """With the lr of this slot."""
        return replace(self, lr=self.lr * self.schedule.factor(slot))

    @property
    def keeps_momentum(self) -> bool:
        return self.momentum != 0.0

    def step(
        self,
        anchor: torch.Tensor,
        delta: torch.Tensor,
        old: torch.Tensor | None,
        momentum: torch.Tensor | None,
        scratch: torch.Tensor,
    ) -> None:
        """One outer step, of whole tensors or of a piece of them. All are 1-D, of the same length and dtype.

        anchor, old (the momentum; None at the first step, or where none is kept): left as they are, since a heal in progress
        may read them. delta: becomes the new anchor. momentum: becomes the new one; None where none is kept. scratch:
        overwritten.
        """
        if momentum is not None:
            if old is None:
                momentum.zero_()
            else:
                torch.mul(old, self.momentum, out=momentum)
            momentum += delta
            if self.nesterov:
                torch.mul(momentum, self.momentum, out=scratch)
                delta += scratch
            else:
                delta.copy_(momentum)
        delta *= self.lr
        torch.sub(anchor, delta, out=delta)
