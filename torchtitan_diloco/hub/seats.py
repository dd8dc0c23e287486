"""Who is in the run: one seat for each island, held by one incarnation at a time, which has to be heard from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.outer.founding import may_found
from torchtitan_diloco.outer.policy import Member


class Phase(Enum):
    JOINING = "joining"
    MEMBER = "member"
    LEFT = "left"
    LOST = "lost"
    EVICTED = "evicted"


PRESENT = (Phase.JOINING, Phase.MEMBER)


@dataclass(slots=True)
class Seat:
    """An island, as its newest incarnation has described itself.

    heard: when, on the hub's clock. idle_s: how long its training loop has shown no life. step: of run progress. slot: the
    next of its published state. stepped: when its last known step was made; pace_s: seconds for one, 0 while unknown.
    first: the slot from which on others wait for it. founder: they do so though it has not been admitted yet. overdue: it has
    no patience left to wait for founders. offered: it was told to take the run's state. state: what it came with.
    lease_s: its own, where signs of life travel as files; nobody waits for one that is excused, until it says something about
    a slot.
    """

    member: Member
    started: float
    heard: float
    phase: Phase = Phase.JOINING
    idle_s: float = 0.0
    step: int = 0
    stepped: float | None = None
    pace_s: float = 0.0
    slot: int = 0
    first: int = 0
    founder: bool = False
    overdue: bool = False
    offered: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float | None = None
    excused: bool = False
    why: str = ""

    @property
    def tokens_total(self) -> int:
        return sum(int(entry["tokens"]) for entry in self.state["fragments"])

    def moved(self, step: int, now: float) -> None:
        """It says that it is at ``step`` of run progress."""
        if step <= self.step:
            return
        made = now - self.idle_s
        if self.stepped is not None and made > self.stepped:
            self.pace_s = (made - self.stepped) / (step - self.step)
        self.step, self.stepped = step, made

    def expected(self, now: float) -> int:
        """Where it stands by now if it has gone on as before: what it has said is some steps old."""
        if self.stepped is None or not self.pace_s:
            return self.step
        return self.step + int((now - self.stepped) / self.pace_s)


class Seats:
    """lease_s: silence after which an island is gone. hang_s: time without life in its training loop after which it is."""

    def __init__(self, lease_s: float, hang_s: float, now: Callable[[], float]) -> None:
        self._lease_s, self._hang_s, self._now = lease_s, hang_s, now
        self._seats: dict[int, Seat] = {}
        self._rivals: dict[
            Member, float
        ] = {}  # since when it has wanted a seat that another incarnation holds

    def __getitem__(self, member: Member) -> Seat:
        """Raises Refusal when it is not, or no longer, in the run."""
        seat = self._seats.get(member.island)
        if seat is None or seat.member != member:
            raise Refusal(
                "stranger", f"island {member.island}, incarnation {member.incarnation}, has not joined"
            )
        if seat.phase not in PRESENT:
            self._require_not_evicted(seat)
            raise Refusal("stranger", f"island {member.island} has been given up: {seat.why}")
        return seat

    def _require_not_evicted(self, seat: Seat) -> None:
        if seat.phase is Phase.EVICTED:
            raise Refusal("refused", f"{seat.why}; start the island again where it is to come back")

    def take(self, member: Member, started: float) -> Seat | str:
        """A seat for who wants to join; or, in words, for what it has to wait.

        Raises Refusal when a newer incarnation holds it, or another one that goes on living.
        """
        seat, now = self._seats.get(member.island), self._now()
        if seat is not None and seat.member == member:
            self._require_not_evicted(seat)
        if seat is not None and seat.member != member:
            who = f"incarnation {seat.member.incarnation} of island {member.island}"
            if seat.started > started:
                raise Refusal("refused", f"{who}, which is newer than this one, is in the run")
            if seat.phase in PRESENT:
                since = self._rivals.setdefault(member, now)
                if seat.heard > since + self._lease_s:
                    raise Refusal(
                        "refused", f"{who} is in the run and alive; each island has its own island.id"
                    )
                return f"{who} to be gone (heard {now - seat.heard:.1f} s ago)"
        if seat is None or seat.member != member or seat.phase not in PRESENT:
            self._rivals.pop(member, None)
            seat = self._seats[member.island] = Seat(member, started, now)
        seat.heard = now
        return seat

    def hear(self, member: Member, idle_s: float) -> Seat:
        """A sign of life. Raises Refusal."""
        seat = self[member]
        seat.heard, seat.idle_s = self._now(), idle_s
        return seat

    def expired(self) -> list[Seat]:
        """Take the seats of those who are gone or hang; which they were."""
        lost = []
        for seat in self._seats.values():
            silent = self._now() - seat.heard
            if seat.phase not in PRESENT:
                continue
            if silent > (seat.lease_s or self._lease_s):
                setting = "spool_timeout_s" if seat.lease_s else "heartbeat_timeout_s"
                seat.why = f"not heard for {silent:.1f} s (syncer.{setting})"
            elif seat.idle_s > self._hang_s:
                seat.why = f"its training loop has not moved for {seat.idle_s:.0f} s (syncer.hang_timeout_s)"
            else:
                continue
            seat.phase = Phase.LOST
            lost.append(seat)
        return lost

    def leave(self, member: Member, reason: str) -> Seat:
        """Raises Refusal."""
        seat = self[member]
        seat.phase, seat.why = (Phase.LOST if reason == "failure" else Phase.LEFT), reason
        return seat

    def evict(self, island: int) -> Seat:
        """Take the seat of an island; this incarnation of it does not get it back. Raises Refusal when it has none."""
        seat = self._seats.get(island)
        if seat is None or seat.phase not in PRESENT:
            raise Refusal("gone", f"island {island} has no seat")
        seat.phase, seat.why = Phase.EVICTED, f"an operator has evicted island {island}"
        return seat

    def only(self, member: Member) -> bool:
        """Whether no other island is there."""
        return all(s.phase not in PRESENT or s.member.island == member.island for s in self._seats.values())

    def founder(self, islands: int, rule: str) -> Seat | None:
        """Whose state a run of so many islands begins with; None while too few are there (see ``outer.founding``)."""
        here = self.of(Phase.JOINING)
        if not may_found(rule, islands, len(here), any(seat.overdue for seat in here)):
            return None
        return max(here, key=lambda s: (s.tokens_total, int(s.state["slot"]), -s.member.island))

    def all(self) -> list[Seat]:
        """Of every island that was ever here, in the order of their numbers."""
        return [seat for _, seat in sorted(self._seats.items())]

    def of(self, phase: Phase) -> list[Seat]:
        """In the order of the islands' numbers."""
        return [seat for seat in self.all() if seat.phase is phase]

    def awaited(self, slot: int) -> list[int]:
        """Islands that take part in a slot."""
        seats = [*self.of(Phase.MEMBER), *(s for s in self.of(Phase.JOINING) if s.founder)]
        return sorted(seat.member.island for seat in seats if seat.first <= slot and not seat.excused)

    def window_s(self, islands: list[int], sync_every: int) -> float:
        """What the slowest of them needs for so many steps of run progress; 0 while unknown.

        Without those whose signs of life travel as files: they are silent for reasons of their own.
        """
        seats = [self._seats[island] for island in islands if island in self._seats]
        return max((sync_every * seat.pace_s for seat in seats if seat.lease_s is None), default=0.0)

    def excuse(self, islands: list[int]) -> None:
        """They have held up a slot for too long; of those whose silence may last, nobody waits in the next ones."""
        for seat in (self._seats[island] for island in islands):
            seat.excused = seat.lease_s is not None

    def holder(self, island: int) -> Seat | None:
        """Who has an island's seat, if somebody has."""
        seat = self._seats.get(island)
        return seat if seat is not None and seat.phase in PRESENT else None

    @property
    def members(self) -> dict[int, Seat]:
        """Seats of those who take part in slots, by island."""
        return {seat.member.island: seat for seat in self.of(Phase.MEMBER)}
