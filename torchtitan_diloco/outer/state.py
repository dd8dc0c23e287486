"""The canonical outer state of a run: anchor, momentum, version, lineage and counters, unsharded and named."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchtitan_diloco.outer.digest import digest, link
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.optimizer import OuterSGD

FORMAT = 1


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment as of its last committed slot. Flat tensors are replaced, never changed in place.

    lineage: hash chain over the fragment's committed slots. tokens: committed into it so far.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    version: int
    digest: str
    lineage: str = ""
    tokens: int = 0


@dataclass(slots=True)
class OuterState:
    """What all islands share. ``slot`` is the next slot to attempt; ``positions`` are consumed samples by island."""

    fragments: Sequence[Fragment]
    optimizer: OuterSGD
    states: list[FragmentState]
    slot: int = 0
    positions: dict[int, int] = field(default_factory=dict)

    @classmethod
    def found(
        cls, fragments: Sequence[Fragment], optimizer: OuterSGD, anchors: Sequence[torch.Tensor]
    ) -> "OuterState":
        """A run's first state, version 0 of every fragment."""
        return cls(fragments, optimizer, [FragmentState(a, None, 0, digest(a)) for a in anchors])

    def commit(
        self,
        slot: int,
        fragment: int,
        merged: torch.Tensor,
        participants: list[int],
        tokens: int,
        positions: Mapping[int, int],
    ) -> FragmentState:
        """Take the outer step of a committed slot: a new anchor version. merged: 1-D, the fragment's length."""
        old = self.states[fragment]
        anchor, momentum = self.optimizer.step(old.anchor, merged, old.momentum)
        value = digest(anchor)
        lineage = link(old.lineage, slot, fragment, value, participants)
        new = FragmentState(anchor, momentum, old.version + 1, value, lineage, old.tokens + tokens)
        self.states[fragment] = new
        self.positions.update(positions)
        self.slot = max(self.slot, slot + 1)
        return new

    @property
    def tokens_total(self) -> int:
        """Committed tokens, summed over the fragments: of two histories, the one with more is the run's."""
        return sum(state.tokens for state in self.states)

    @property
    def lineage(self) -> str:
        """Names the whole history: the lineages of all fragments."""
        return hashlib.sha256("".join(state.lineage for state in self.states).encode()).hexdigest()

    def fail(self, slot: int) -> None:
        """A failed attempt uses up its slot and changes nothing else."""
        self.slot = max(self.slot, slot + 1)

    def copy(self) -> "OuterState":
        """A consistent view at this moment that later commits do not touch (tensors are shared, not copied)."""
        return replace(self, states=list(self.states), positions=dict(self.positions))

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
            "positions": {str(k): v for k, v in self.positions.items()},
            "fragments": [
                {"version": s.version, "digest": s.digest, "lineage": s.lineage, "tokens": s.tokens}
                for s in self.states
            ],
        }

    def restore(self, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
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
            if anchor is None or digest(anchor) != entry["digest"]:
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
                )
            )
        self.states = states
        self.slot = int(description["slot"])
        self.positions = {int(k): int(v) for k, v in description["positions"].items()}
