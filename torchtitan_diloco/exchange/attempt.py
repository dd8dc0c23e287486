"""One attempt at a slot as an island sees it, and what the protocol asks its transport to do."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from torchtitan_diloco.exchange.messages import Epoch, Message, Outcome
from torchtitan_diloco.outer.policy import Header, Member, Roll
from torchtitan_diloco.outer.slices import Division
from torchtitan_diloco.outer.state import Advance, OuterStep

Stage = Literal["whole", "slices", "merged"]
"""Of the bulk: whole payloads to everybody. Or slices to their owners, then the merged slices to everybody."""


class Phase(Enum):
    HEADERS = "headers"
    BULK = "bulk"
    CONFIRM = "confirm"
    RESOLVE = "outcome"


@dataclass(frozen=True, slots=True)
class Send:
    to: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Bulk:
    """Send each of ``members`` (all of whom do the same) its part, then call ``bulk_done`` or ``bulk_failed``, once.

    fragment: never twice under way at once. whole: the members are all of the epoch's. sends: what each member gets, in
    their order (what is meant for this island itself stays here); 1-D uint8. sizes: the bytes that come from each.
    """

    attempt: tuple[int, str]
    stage: Stage
    fragment: int
    members: tuple[Member, ...]
    whole: bool
    sends: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]

    def traffic(self, me: Member) -> tuple[int, int]:
        """Bytes that this island sends to others, and receives from them."""
        others = [i for i, member in enumerate(self.members) if member != me]
        return sum(self.sends[i].nbytes for i in others), sum(self.sizes[i] for i in others)


@dataclass(frozen=True, slots=True)
class Abandon:
    """The bulk of this attempt is no longer wanted; its end is ignored."""

    attempt: tuple[int, str]


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask for a new membership epoch, since the present one cannot be used again."""


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: Outcome


Effect = Send | Bulk | Abandon | Renew | Finished


@dataclass(slots=True)
class Offer:
    header: Header
    payload: torch.Tensor
    outer_step: OuterStep
    serial: int = 0
    tries: int = 0
    phase: Phase = Phase.HEADERS
    epoch: Epoch | None = None
    waits: int = 0  # ticks without an epoch to attempt it under
    roll: Roll | None = None
    stage: Stage = "whole"
    division: Division | None = None  # among the owners of slices, if they merge
    advance: Advance | None = None
    digest: str = ""  # of what came out, which is confirmed
    weights: tuple[float, ...] = ()
    confirms: dict[int, str] = field(default_factory=dict)
    answers: set[int] = field(default_factory=set)

    @property
    def slot(self) -> int:
        return self.header.slot

    def others(self, me: Member) -> list[Member]:
        """The other members this attempt needs."""
        assert self.epoch is not None
        needed = self.roll.members if self.roll else self.epoch.islands()
        return [m for m in self.epoch.members if m != me and m.island in needed]
