"""One attempt at a slot as an island sees it, and what the protocol asks its transport to do."""

from dataclasses import dataclass, field
from enum import Enum

import torch

from torchtitan_diloco.exchange.messages import Epoch, Member, Message, Outcome
from torchtitan_diloco.outer.policy import Header, Roll


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
    """Exchange the payload with ``members`` (all of whom do the same), then call ``bulk_done`` or ``bulk_failed``.

    fragment: never twice under way at once. whole: the members are all of the epoch's.
    """

    attempt: tuple[int, str]
    fragment: int
    members: tuple[Member, ...]
    whole: bool
    payload: torch.Tensor


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
    serial: int = 0
    tries: int = 0
    phase: Phase = Phase.HEADERS
    epoch: Epoch | None = None
    roll: Roll | None = None
    merged: torch.Tensor | None = None
    digest: str = ""
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
