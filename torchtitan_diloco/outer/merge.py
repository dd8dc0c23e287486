"""Merge rules: how the deltas of several islands become one."""

import math
from collections.abc import Sequence
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
    """What one island brings to a slot: inner steps and tokens since it last applied the fragment; its encoded delta."""

    island: int
    steps: int
    tokens: int
    payload: torch.Tensor


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
) -> tuple[torch.Tensor, list[float]]:
    """Weighted mean of the deltas: ((w_0 d_0 + w_1 d_1) + w_2 d_2) + ..., in the order of island ids.

    plan: decodes the payloads. Each product and each sum is rounded to float32. Returns the merged delta (memory of its
    own) and the weights.
    """
    ordered = sorted(contributions, key=lambda c: c.island)
    shares = weights([(c.steps, c.tokens) for c in ordered], kind)
    merged = buffers.empty(plan.numel, plan.dtype)
    plan.weighted_sum([contribution.payload for contribution in ordered], shares, merged)
    return merged, shares
