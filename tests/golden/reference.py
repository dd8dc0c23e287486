"""The outer loop recomputed from what the islands sent. Imports NumPy and the standard library, nothing of ours.

Teacher-forced: the inner training is taken as it happened (each island's parameters at every send), the outer loop is
computed anew, fragment by fragment. Every product and every sum is rounded to the dtype of the founding parameters, in
this order:

    delta_i = anchor - local_i                                          (+ e_i with error feedback; e_i = 0 at first)
    sent_i  = decode(encode(delta_i))                                   delta_i itself where the wire is fp32
    e_i'    = delta_i - sent_i                                          once the slot has committed with island i's part in it
    delta   = ((w_0 sent_0 + w_1 sent_1) + w_2 sent_2) + ...            in the order of island ids; beyond four islands
                                                                        encoded once more, see ``slices_reference``
    v'      = mu v + delta                                              v = 0 before the fragment's first slot
    u       = mu v' + delta (Nesterov), or v'
    anchor' = anchor - lr u
    local'  = alpha local + (1 - alpha) anchor'                         tau steps after the send

Weights are normalised in float64 (their sum rounded once) and then rounded to that dtype, as mu, lr, alpha and 1 - alpha are.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import xxhash

from tests.golden.codec_reference import Wire, decode, encode, noise_seed
from tests.golden.slices_reference import Owned, Slot, encoded_again

Tensors = Mapping[str, np.ndarray]
"""By name; rows of a tensor are named ``name[start:stop]``."""

ROWS = re.compile(r"^(.*)\[(\d+):(\d+)\]$")


@dataclass(frozen=True)
class Send:
    """What an island sent: the values of a fragment's tensors, inner steps and tokens since it last applied the fragment."""

    parameters: Tensors
    steps: int
    tokens: int
    fragment: int = 0
    coarse: frozenset[str] = frozenset()
    """Names of the tensors that this island trains in bfloat16."""


@dataclass(frozen=True)
class Outer:
    """Outer optimizer, merge weights and wire of a run. Local SGD is lr 1 without momentum.

    run: its id, for the noise. islands: how many have founded it. slots: of the whole run, for the schedule, which ends at
    ``least`` times the lr. hub: it merges and encodes the result.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    schedule: str = "constant"
    weight: str = "tokens"
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    wire: Wire = field(default_factory=lambda: Wire("fp32"))
    feedback: bool = False
    run: str = ""
    islands: int = 1
    slots: int = 0
    hub: bool = False
    least: float = 0.25


@dataclass(frozen=True)
class Result:
    """The state of a fragment after a slot. momentum is None where none is kept; weights are those of the slot.

    residuals: of every island that has sent something of the fragment, with error feedback. owned: of every slice, if its
    owner has merged it.
    """

    slot: int
    fragment: int
    version: int
    anchor: np.ndarray
    momentum: np.ndarray | None
    digest: str
    lineage: str
    weights: tuple[float, ...]
    participants: tuple[int, ...]
    tokens: int
    residuals: Mapping[int, np.ndarray]
    owned: Owned = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """When an island sends a slot, and when it applies what became of it, in inner steps."""

    slot: int
    fragment: int
    sent: int
    applied: int


def schedule(sync_every: int, steps: int, outer: Outer) -> list[Turn]:
    """Fragments take turns, evenly spread over ``sync_every`` steps; at the last step each is due once."""
    turns = []
    while True:
        slot = len(turns)
        due = -(-(slot + 1) * sync_every // outer.fragments)
        if due >= steps:
            break
        turns.append(Turn(slot, slot % outer.fragments, due, min(due + outer.overlap, steps)))
    ends = range(len(turns), len(turns) + outer.fragments)
    return [*turns, *(Turn(slot, slot % outer.fragments, steps, steps) for slot in ends)]


def place(name: str) -> tuple[str, int]:
    """Where a tensor, or rows of it, stand in a flat buffer: by name, then by row."""
    rows = ROWS.match(name)
    return (rows[1], int(rows[2])) if rows else (name, 0)


def flatten(tensors: Tensors) -> np.ndarray:
    """One 1-D buffer, tensors in the order of their names and rows."""
    return np.concatenate(
        [np.ascontiguousarray(tensors[name]).reshape(-1) for name in sorted(tensors, key=place)]
    )


def digest_of(flat: np.ndarray) -> str:
    """SHA-256 of the XXH3-128 of the bytes."""
    return hashlib.sha256(xxhash.xxh3_128_digest(flat.tobytes())).hexdigest()


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


def lr_share(outer: Outer, slot: int) -> float:
    """Of the outer lr, in a slot."""
    if outer.schedule == "constant":
        return 1.0
    left = (outer.slots - 1 - slot) / (outer.slots - 1)
    if outer.schedule == "cosine":
        left = float(np.sin(np.pi / 2 * left)) ** 2
    return round(outer.least + (1 - outer.least) * left, 9)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16 (ties to even), as float32. Finite values only."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def delta_of(anchor: np.ndarray, send: Send) -> np.ndarray:
    """Anchor minus local; from the rounded anchor where the island trains in bfloat16, since it started there."""
    start, offset = anchor.copy(), 0
    for name in sorted(send.parameters, key=place):
        size = send.parameters[name].size
        if place(name)[0] in send.coarse:
            start[offset : offset + size] = to_bfloat16(start[offset : offset + size])
        offset += size
    return start - flatten(send.parameters)


def mix(local: np.ndarray, anchor: np.ndarray, alpha: float, coarse: bool = False) -> np.ndarray:
    """The island's values after it has applied a result; rounded to bfloat16 where it trains in that."""
    number = anchor.dtype.type
    mixed = local * number(alpha) + anchor * number(1.0 - alpha) if alpha else anchor
    return to_bfloat16(mixed) if coarse else mixed


def replay(
    foundings: Sequence[np.ndarray],
    slots: Iterable[tuple[int, Mapping[int, Send]]],
    outer: Outer,
    healed: Collection[tuple[int, int]] = (),
) -> list[Result]:
    """The outer loop over the committed slots: (slot number, island -> what it sent). foundings: by fragment, flat.

    An island that made no step since it last applied the fragment has no say in the slot. healed: (island, slot) where
    the island took the slot's result from another, and began anew without a residual.
    """
    anchors = list(foundings)
    momenta: list[np.ndarray | None] = [None] * len(anchors)
    residuals: list[dict[int, np.ndarray]] = [{} for _ in anchors]
    owned: list[Owned] = [{} for _ in anchors]
    lineages = [""] * len(anchors)
    versions = [0] * len(anchors)
    results = []
    for slot, sends in slots:
        f = slot % outer.fragments
        number = anchors[f].dtype.type
        islands = [i for i in sorted(sends) if sends[i].steps > 0]
        weights = shares([(sends[i].steps, sends[i].tokens) for i in islands], outer.weight)
        delta: np.ndarray | None = None
        for island, weight in zip(islands, weights, strict=True):
            own = delta_of(anchors[f], sends[island])
            if outer.feedback:
                own = own + residuals[f].get(island, np.zeros_like(own))
            sent = own
            if outer.wire.name != "fp32":
                seed = noise_seed(outer.run, slot, f, island)
                sent = decode(outer.wire, encode(outer.wire, own, seed), own.size)
            residuals[f][island] = np.zeros_like(own) if (island, slot) in healed else own - sent
            part = sent * number(weight)
            delta = part if delta is None else delta + part
        assert delta is not None
        where = Slot(outer.run, slot, f, outer.fragments, outer.islands, sorted(sends), outer.hub)
        if where.has_owners:
            delta, after = encoded_again(outer.wire, delta, where, owned[f], outer.feedback)
            owned[f] = {part: held for part, held in after.items() if (held[0], slot) not in healed}
        momentum = None
        if outer.momentum == 0.0:
            update = delta
        else:
            before = momenta[f]
            momentum = (np.zeros_like(delta) if before is None else before) * number(outer.momentum) + delta
            update = momentum * number(outer.momentum) + delta if outer.nesterov else momentum
        anchors[f] = anchors[f] - update * number(outer.lr * lr_share(outer, slot))
        momenta[f] = momentum
        versions[f] += 1
        digest = digest_of(anchors[f])
        entry = json.dumps([lineages[f], slot, f, digest, islands, sorted(sends)])
        lineages[f] = hashlib.sha256(entry.encode()).hexdigest()
        results.append(
            Result(
                slot,
                f,
                versions[f],
                anchors[f],
                momentum,
                digest,
                lineages[f],
                weights,
                tuple(islands),
                tokens=sum(sends[i].tokens for i in islands),
                residuals=dict(residuals[f]) if outer.feedback else {},
                owned=owned[f],
            )
        )
    return results
