"""Merge rules: how the deltas of several islands become one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.codec import Plan, SlicedPlan

Weight = Literal["tokens", "steps", "equal"]

ELEMENTWISE = frozenset({"mean"})
"""Merge rules whose result at a value depends on the deltas at that value only; with others fragments are not cut."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one island brings to a slot: inner steps and tokens since it last applied the fragment; its encoded delta.

    spare: nobody needs the payload once it is merged, so its memory may become that of the merged delta.
    """

    island: int
    steps: int
    tokens: int
    payload: torch.Tensor
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged delta in the making, so that what follows finds each piece of it still in the processor's cache.

    delta: 1-D; as far as ``pieces`` has come, from 0 on without gaps, its values are there.
    """

    delta: torch.Tensor
    pieces: Iterator[slice]

    @classmethod
    def of(cls, delta: torch.Tensor) -> "Merged":
        """Of one that is there already."""
        return cls(delta, iter((slice(0, delta.numel()),)))

    def whole(self) -> torch.Tensor:
        """The delta, once all of it is there."""
        for _ in self.pieces:
            pass
        return self.delta

    def pieces_of(self, length: int) -> Iterator[slice]:
        """The pieces cut anew, into ``length`` values each, but for the last."""
        start = 0
        for piece in self.pieces:
            while piece.stop - start >= length:
                yield slice(start, start + length)
                start += length
        if start < self.delta.numel():
            yield slice(start, self.delta.numel())


def weights(counts: Sequence[tuple[int, int]], kind: Weight) -> list[float]:
    """Normalised weights (float64, sum 1) from each island's (steps, tokens).

    "tokens" is tokens^2 / steps: quantity times effective batch (Decoupled DiLoCo, arXiv 2604.21428, section 3.2).
    An island without steps weighs nothing. Raises ValueError when nobody has any.
    """
    if kind == "equal":
        raw = [1.0 if steps else 0.0 for steps, _ in counts]
    elif kind == "steps":
        raw = [float(steps) for steps, _ in counts]
    else:
        raw = [tokens * tokens / steps if steps else 0.0 for steps, tokens in counts]
    # sum() rounds differently from Python 3.12 on, and islands need not run the same one.
    total = math.fsum(raw)
    if total == 0.0:
        raise ValueError("no island made an inner step since its last slot")
    return [value / total for value in raw]


def mean(
    contributions: Sequence[Contribution], kind: Weight, plan: Plan | SlicedPlan
) -> tuple[Merged, list[float]]:
    """Weighted mean of the deltas: ((w_0 d_0 + w_1 d_1) + w_2 d_2) + ..., in the order of island ids.

    plan: decodes the payloads. Each product and each sum is rounded to float32. Returns the merged delta (in memory of its
    own, or that of a spare payload) and the weights.
    """
    ordered = sorted(contributions, key=lambda c: c.island)
    shares = weights([(c.steps, c.tokens) for c in ordered], kind)
    spare = next((c.payload for c in ordered if c.spare), None) if plan.in_place else None
    delta = buffers.empty(plan.numel, plan.dtype) if spare is None else spare.view(plan.dtype)
    return Merged(
        delta, plan.sum_by_pieces([contribution.payload for contribution in ordered], shares, delta)
    ), shares
