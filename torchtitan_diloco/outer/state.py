"""The canonical outer state of a run: anchor, momentum, version, lineage and counters, unsharded and named."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.digest import Checksum, digest, is_finite, link
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.history import extend, has_more, have_parted, outranks
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.pieces import piece_length
from torchtitan_diloco.outer.shares import Holds

FORMAT = 3


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment as of its last committed slot. Flat tensors are replaced, never changed in place.

    lineage: hash chain over the fragment's committed slots. tokens: committed into it so far. trail: see ``outer.history``.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    version: int
    digest: str
    lineage: str = ""
    tokens: int = 0
    trail: str = ""


@dataclass(frozen=True, slots=True)
class Advance:
    """Where an outer step takes a fragment; in force once its slot is committed.

    digest: of the anchor. merged: checksum of the delta that led there; where the anchor rounds to the same bits, the
    momentum may differ. finite: the anchor is.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    digest: str
    merged: str
    finite: bool


OuterStep = Callable[[Merged], Advance]
"""From a slot's merged delta (the fragment's length; used up) to where it leads. Callable in any thread."""


@dataclass(slots=True)
class OuterState:
    """What all islands share.

    slot: the next to attempt. positions: how far each stream was read (see ``shares``) as of the last committed slot.
    members: the islands of that slot with the shards they hold (None: not known yet, only before the first one).
    hand_over: whether shards change hands at committed slots; else each founding island keeps its own.
    """

    fragments: Sequence[Fragment]
    optimizer: OuterSGD
    states: list[FragmentState]
    slot: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    members: dict[int, Holds | None] = field(default_factory=dict)
    hand_over: bool = True

    @classmethod
    def found(
        cls,
        fragments: Sequence[Fragment],
        optimizer: OuterSGD,
        anchors: Sequence[torch.Tensor],
        islands: int = 1,
        hand_over: bool = True,
    ) -> "OuterState":
        """A run's first state, version 0 of every fragment, with ``islands`` founding islands."""
        states = [FragmentState(a, None, 0, digest(a)) for a in anchors]
        return cls(fragments, optimizer, states, members=dict.fromkeys(range(islands)), hand_over=hand_over)

    @property
    def turn(self) -> int:
        """Committed slots so far, which shards move on with; 0 where they do not."""
        return sum(state.version for state in self.states) if self.hand_over else 0

    def outer_step(self, fragment: int, slot: int) -> OuterStep:
        """A slot's outer step, from where the fragment stands now."""
        return partial(_advance, self.optimizer.at(slot), self.states[fragment])

    def commit(
        self,
        slot: int,
        fragment: int,
        advance: Advance,
        participants: list[int],
        tokens: int,
        positions: Mapping[str, int],
        members: Mapping[int, Holds],
    ) -> FragmentState:
        """A slot is committed: its outer step makes a new anchor version. advance: from the fragment's present state.

        positions: of the streams that were read. members: everybody who takes the result, with what they hold.
        """
        old = self.states[fragment]
        lineage = link(old.lineage, slot, fragment, advance.digest, participants, members)
        trail = extend(old.trail, lineage)
        counted = (old.version + 1, advance.digest, lineage, old.tokens + tokens, trail)
        new = FragmentState(advance.anchor, advance.momentum, *counted)
        self.states[fragment] = new
        self.positions |= positions
        if self.hand_over:
            self.members = dict(members)
        self.slot = max(self.slot, slot + 1)
        return new

    @property
    def tokens_total(self) -> int:
        """Committed tokens, summed over the fragments: of two histories, the one with more is the run's."""
        return sum(state.tokens for state in self.states)

    @property
    def lineage(self) -> str:
        """Names the whole history: the lineages of all fragments; empty before the first committed slot."""
        chains = "".join(state.lineage for state in self.states)
        return hashlib.sha256(chains.encode()).hexdigest() if chains else ""

    def fail(self, slot: int) -> None:
        """A failed attempt uses up its slot and changes nothing else."""
        self.slot = max(self.slot, slot + 1)

    def copy(self) -> "OuterState":
        """A consistent view at this moment that later commits do not touch (tensors are shared, not copied)."""
        return replace(
            self, states=list(self.states), positions=dict(self.positions), members=dict(self.members)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name: ``anchor.<fragment>`` and, where kept, ``momentum.<fragment>``."""
        named = {f"anchor.{i}": s.anchor for i, s in enumerate(self.states)}
        named |= {f"momentum.{i}": s.momentum for i, s in enumerate(self.states) if s.momentum is not None}
        return named

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        return {
            "format": FORMAT,
            "slot": self.slot,
            "positions": dict(sorted(self.positions.items())),
            "members": {
                str(island): None if holds is None else dict(holds)
                for island, holds in sorted(self.members.items())
            },
            "fragments": [
                {
                    "version": s.version,
                    "digest": s.digest,
                    "lineage": s.lineage,
                    "tokens": s.tokens,
                    "trail": s.trail,
                }
                for s in self.states
            ],
        }

    def restore(
        self,
        description: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        digest_of: Callable[[torch.Tensor], str] = digest,
    ) -> None:
        """Replace this state by one that ``describe`` and ``tensors`` gave, here or elsewhere.

        Raises ValueError, and changes nothing, when a tensor is missing, has another length or dtype, or an anchor does
        not match its digest.
        """
        if description.get("format") != FORMAT:
            raise ValueError(
                f"outer state has format {description.get('format')!r}, this version reads {FORMAT}"
            )
        states = []
        for i, (fragment, entry) in enumerate(zip(self.fragments, description["fragments"], strict=True)):
            anchor, momentum = tensors.get(f"anchor.{i}"), tensors.get(f"momentum.{i}")
            dtype = self.states[i].anchor.dtype
            for name, tensor in (("anchor", anchor), ("momentum", momentum)):
                if tensor is not None and (tensor.dtype != dtype or tensor.shape != (fragment.numel,)):
                    raise ValueError(f"{name} of fragment {i} is {tensor.dtype} {tuple(tensor.shape)}")
            if anchor is None or digest_of(anchor) != entry["digest"]:
                raise ValueError(f"anchor of fragment {i} is missing or does not match its digest")
            if self.optimizer.keeps_momentum and momentum is None and entry["version"] > 0:
                raise ValueError(f"momentum of fragment {i} is missing")
            states.append(
                FragmentState(
                    anchor,
                    momentum,
                    int(entry["version"]),
                    str(entry["digest"]),
                    str(entry["lineage"]),
                    int(entry["tokens"]),
                    str(entry.get("trail", "")),
                )
            )
        positions = {str(name): int(position) for name, position in description["positions"].items()}
        members: dict[int, Holds | None] = {
            int(island): None if holds is None else {str(k): str(v) for k, v in holds.items()}
            for island, holds in description["members"].items()
        }
        self.states, self.positions, self.members = states, positions, members
        self.slot = int(description["slot"])


def _advance(optimizer: OuterSGD, state: FragmentState, merged: Merged) -> Advance:
    """The outer step with its checks, in one pass over the memory: piece by piece, as the merged delta comes into being."""
    delta, old = merged.delta, state.momentum
    momentum = buffers.empty(delta.numel(), delta.dtype) if optimizer.keeps_momentum else None
    scratch = torch.empty(min(piece_length(), delta.numel()), dtype=delta.dtype)
    before, after, finite = Checksum(), Checksum(), True
    for here in merged.pieces_of(piece_length()):
        piece = delta[here]
        before.add(piece)
        optimizer.step(
            state.anchor[here],
            piece,
            None if old is None else old[here],
            None if momentum is None else momentum[here],
            scratch[: piece.numel()],
        )
        after.add(piece)
        finite = finite and is_finite(piece)
    return Advance(delta, momentum, after.digest(), before.hex(), finite)


def combine(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What to hold of two descriptions of one run: of each fragment the longer history, as ``policy.call_roll`` ranks them.

    Neither island need be ahead in everything: slots of different fragments commit in any order. Where the two histories
    have parted, all fragments are those of one of them.
    """
    parted, mine_wins = have_parted(mine, theirs), outranks(mine, theirs)

    def rank(entry: Mapping[str, Any]) -> tuple[int, int, str, str]:
        return entry["tokens"], entry["version"], entry["lineage"], entry["digest"]

    pairs = list(zip(mine["fragments"], theirs["fragments"], strict=True))
    ahead = mine_wins if parted else has_more(mine, theirs)
    # What was read in a history that is not continued has not been read.
    positions = dict(mine["positions"] if parted and mine_wins else theirs["positions"])
    for name, position in ({} if parted else mine["positions"]).items():
        positions[name] = max(position, positions.get(name, 0))
    return {
        **theirs,
        "fragments": [(m if mine_wins else t) if parted else max(m, t, key=rank) for m, t in pairs],
        "positions": positions,
        "members": mine["members"] if ahead else theirs["members"],
        "slot": max(mine["slot"], theirs["slot"]),
    }
