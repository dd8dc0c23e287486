"""Local SGD and DiLoCo recomputed from what the islands sent. Imports NumPy and the standard library, nothing of ours.

Teacher-forced: the inner training is taken as it happened (each island's parameters at every send), the outer loop is
computed anew. Every product and every sum is rounded to the dtype of the founding parameters, in this order:

    delta_i = anchor - local_i
    delta   = ((w_0 delta_0 + w_1 delta_1) + w_2 delta_2) + ...         in the order of island ids
    v'      = mu v + delta                                              v = 0 before the first slot
    u       = mu v' + delta (Nesterov), or v'
    anchor' = anchor - lr u

Weights are normalised in float64 (their sum rounded once) and then rounded to that dtype, as mu and lr are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Send:
    """An island's parameters at a send, and the inner steps and tokens since it last applied a slot."""

    parameters: Tensors
    steps: int
    tokens: int
    coarse: frozenset[str] = frozenset()
    """Names of the tensors that this island trains in bfloat16."""


@dataclass(frozen=True)
class Outer:
    """The outer optimizer and the merge weights of a run. Local SGD is lr 1 without momentum."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight: str = "tokens"


@dataclass(frozen=True)
class Result:
    """The state after a slot. momentum is None where the optimizer keeps none; weights are those of the slot."""

    slot: int
    anchor: np.ndarray
    momentum: np.ndarray | None
    digest: str
    lineage: str
    weights: tuple[float, ...]
    tokens: int


def flatten(tensors: Tensors) -> np.ndarray:
    """One 1-D buffer, tensors in the order of their names."""
    return np.concatenate([np.ascontiguousarray(tensors[name]).reshape(-1) for name in sorted(tensors)])


def sha256(flat: np.ndarray) -> str:
    return hashlib.sha256(flat.tobytes()).hexdigest()


def shares(counts: Iterable[tuple[int, int]], weight: str) -> tuple[float, ...]:
    """The islands' weights from their (steps, tokens): tokens^2 / steps, steps, or the same for all; sum 1."""
    raw = {
        "tokens": [tokens * tokens / steps for steps, tokens in counts],
        "steps": [float(steps) for steps, _ in counts],
        "equal": [1.0 for _ in counts],
    }[weight]
    total = float(sum((Fraction(value) for value in raw), Fraction(0)))
    return tuple(value / total for value in raw)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16 (ties to even), as float32. Finite values only."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def delta_of(anchor: np.ndarray, founding: Tensors, send: Send) -> np.ndarray:
    """Anchor minus local; from the rounded anchor where the island trains in bfloat16, since it started there."""
    start, offset = anchor.copy(), 0
    for name in sorted(founding):
        size = founding[name].size
        if name in send.coarse:
            start[offset : offset + size] = to_bfloat16(start[offset : offset + size])
        offset += size
    return start - flatten(send.parameters)


def replay(founding: Tensors, slots: Iterable[tuple[int, Mapping[int, Send]]], outer: Outer) -> list[Result]:
    """The outer loop over the committed slots: (slot number, island -> what it sent)."""
    anchor = flatten(founding)
    number = anchor.dtype.type
    momentum: np.ndarray | None = None
    lineage = ""
    results = []
    for slot, sends in slots:
        islands = sorted(sends)
        weights = shares([(sends[i].steps, sends[i].tokens) for i in islands], outer.weight)
        delta: np.ndarray | None = None
        for island, weight in zip(islands, weights, strict=True):
            part = delta_of(anchor, founding, sends[island]) * number(weight)
            delta = part if delta is None else delta + part
        assert delta is not None
        if outer.momentum == 0.0:
            update = delta
        else:
            before = np.zeros_like(anchor) if momentum is None else momentum
            momentum = before * number(outer.momentum) + delta
            update = momentum * number(outer.momentum) + delta if outer.nesterov else momentum
        anchor = anchor - update * number(outer.lr)
        digest = sha256(anchor)
        entry = json.dumps([lineage, slot, 0, digest, islands])
        lineage = hashlib.sha256(entry.encode()).hexdigest()
        tokens = sum(send.tokens for send in sends.values())
        results.append(Result(slot, anchor, momentum, digest, lineage, weights, tokens))
    return results
