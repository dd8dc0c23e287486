"""The hub as a state machine without I/O: who is in the run, what they say about each slot, and what becomes of it.

A slot is open from its first header on. Once everybody who is there has said something the roll is called, and when the
contributors' payloads are here they are merged, slot by slot in order. That the hub has committed a slot is the whole
decision: islands learn of it when they ask, and whoever has missed it takes the hub's state.

Everything that arrives may arrive twice, late, or again after the hub was started anew; saying it again is always safe.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from torchtitan_diloco.hub.recovery import RETURN_S, Recovery, later
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.rules import Rules
from torchtitan_diloco.hub.seats import Phase, Seat, Seats
from torchtitan_diloco.hub.shelf import Arrivals, Shelf
from torchtitan_diloco.hub.slot import Job, Open, Record
from torchtitan_diloco.hub.store import NoStore, Snapshot, Store
from torchtitan_diloco.hub.terms import Hello, Terms
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.workshop import Workshop
from torchtitan_diloco.outer.history import has_more
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState

REMEMBERED = 256  # slots whose outcome is kept for those who ask late


class Hub:
    """Not thread-safe, and no call takes long, except ``Job.run`` which needs no lock."""

    def __init__(
        self, rules: Rules, store: Store | None = None, now: Callable[[], float] = time.monotonic,
        workshop: Workshop | None = None,
    ) -> None:  # fmt: skip
        self.rules, self.now, self.workshop = rules, now, workshop or Workshop()
        self.store: Store = store or NoStore()
        self.seats = Seats(rules.lease_s, rules.hang_s, now)
        self.terms: Terms | None = None
        self.state: OuterState | None = None
        self.open: dict[int, Open] = {}
        self.records: dict[int, Record] = {}
        self.payloads: dict[int, torch.Tensor] = {}
        """The encoded results that some member may still fetch, by slot."""
        self.shelf = Shelf(now)
        self._arrivals = Arrivals(self.workshop)
        self._withdrawn: set[tuple[int, Member]] = set()
        self._recovery = Recovery(now, rules.wait_s, rules.lease_s + RETURN_S)
        found = self.store.load()
        if found is not None:
            self._merger = self.workshop.merger(found.terms)
            self._merger.restore(dict(found.residuals))
            self.terms, self.state = found.terms, found.state
            self.records = {record.slot: record for record in found.records}
            self._recovery.begin(found)

    # ---- coming and going ------------------------------------------------------------------------------------------

    def join(self, hello: Hello) -> dict[str, Any]:
        """A step on the way into the run; asked again and again, until its status is "take" and ``admit`` has followed.

        "wait": for what ``why`` says. "upload": the tensors that the island has to bring. "take": the island makes the
        described state its own. Raises Refusal.
        """
        self._agree(hello)
        seat = self.seats.take(hello.member, hello.started)
        if isinstance(seat, str):
            return {"status": "wait", "why": seat}
        if seat.phase is Phase.MEMBER:  # said a second time
            return self._offer_state(seat)
        seat.state, seat.step, seat.offered = hello.state, hello.step, False
        seat.overdue = seat.overdue or hello.overdue
        try:
            if self.state is None:
                return self._found(seat)
            if not self.seats.members and not self.open:
                return self._resume(seat)
            if has_more(seat.state, self.state.describe()):
                return self._overtake(seat)
        except Refusal as refusal:
            self._drop(self.seats.leave(hello.member, str(refusal)))
            raise
        return self._offer_state(seat)

    def admit(self, member: Member, slot: int) -> dict[str, Any]:
        """The island holds a state whose next slot is ``slot`` and takes part from now on. Raises Refusal."""
        seat = self.seats[member]
        self.shelf.done(member)
        if seat.phase is not Phase.MEMBER:
            if not seat.offered:
                raise Refusal("stranger", f"island {member.island} has not been offered the run's state yet")
            seat.phase = Phase.MEMBER
            if self._recovery.back(member.island):
                seat.first = slot
            elif not seat.founder:
                seat.first = max([slot, *(s + 1 for s in self.open)])
        seat.slot = max(seat.slot, slot)
        self._arrivals.drop(member)
        self.seats.hear(member, 0.0)
        return {"step": self._step_for(seat), "present": sorted(self.seats.members)}

    def beat(self, member: Member, step: int, slot: int, idle_s: float) -> dict[str, Any]:
        """A sign of life. step: of run progress. slot: next of the state it holds. Raises Refusal."""
        seat = self.seats.hear(member, idle_s)
        seat.moved(step, self.now())
        seat.slot = max(seat.slot, slot)
        self._forget()
        return {"member": seat.phase is Phase.MEMBER}

    def leave(self, member: Member, reason: str) -> None:
        """Nobody waits for this island any more. Raises Refusal."""
        self._drop(self.seats.leave(member, reason))

    def evict(self, island: int) -> None:
        """As if the island were gone, and it may not come back before it is started anew. Raises Refusal."""
        self._drop(self.seats.evict(island))

    def tick(self) -> list[Seat]:
        """Time has passed. Returns who was given up."""
        lost = self.seats.expired()
        for seat in lost:
            self._drop(seat)
        self._look()
        self.shelf.tidy()
        return lost

    def _agree(self, hello: Hello) -> None:
        terms = hello.terms
        if self.terms is None or (self.state is None and self.seats.only(hello.member)):
            # Until there is a run, who is alone may change its mind: it may have been started again with other settings.
            if terms != self.terms:
                try:
                    self._merger = self.workshop.merger(terms)
                except (ValueError, TypeError, ArithmeticError) as error:
                    raise Refusal("malformed", f"no hub can merge by these settings: {error}") from None
                self.terms = terms
            return
        if why := self.terms.disagreement(terms):
            if self.state is None or not self.seats.only(hello.member):
                raise Refusal("refused", why)
            self._amend(terms, why)

    def _amend(self, terms: Terms, why: str) -> None:
        """The run has stopped, and goes on with what whoever comes back first has in place of its settings."""
        assert self.terms is not None and self.state is not None
        if self._recovery.returning and not terms.prolong(self.terms):
            islands = sorted(self._recovery.returning)
            raise Refusal(
                "refused", f"{why}; only a stopped run can be changed, and islands {islands} are in it"
            )
        state, residuals = terms.carry(self.state), self._merger.residuals()
        if state is None:
            raise Refusal("refused", f"{why}; this cannot be changed in a run")
        self._merger = self.workshop.merger(terms)
        with suppress(ValueError):  # those of another encoding have no meaning any more
            self._merger.restore(residuals)
        self.terms, self.state = terms, state
        self._save(at_once=True)

    def _found(self, seat: Seat) -> dict[str, Any]:
        """The run's first state is that of the island with the longest history, once all are there, or enough of them."""
        assert self.terms is not None
        first = self.seats.founder(self.terms.islands, self.terms.found)
        if first is None:
            here = self.seats.of(Phase.JOINING)
            why = f"{self.terms.islands} islands; islands present: {', '.join(str(s.member.island) for s in here)}"
            return {"status": "wait", "why": why, "founders": len(here)}
        if first is not seat:
            return {"status": "wait", "why": f"island {first.member.island} to bring the run's state"}
        return self._adopt(seat)

    def _resume(self, seat: Seat) -> dict[str, Any]:
        """Nobody trains by the hub's state yet, which may be that of an earlier day than some island's."""
        assert self.state is not None
        mine = self.state.describe()
        if later(seat.state, mine):
            return self._adopt(seat)
        if others := [s.member.island for s in self.seats.of(Phase.JOINING) if later(s.state, mine)]:
            return {"status": "wait", "why": f"islands {others} to bring the later state that they hold"}
        if awaited := self._recovery.awaits(self.state, seat.member.island):
            return {"status": "wait", "why": f"islands {awaited}, which may hold later state"}
        # What was committed and nobody has taken can be made again.
        self.records = {s: r for s, r in self.records.items() if s < self.state.slot}
        return self._offer_state(seat)

    def _overtake(self, seat: Seat) -> dict[str, Any]:
        """The run has begun again from less than this island holds: what it brings is the run's, the others take it."""
        if any(slot.merging for slot in self.open.values()):
            return {"status": "wait", "why": "the end of a merge, before the hub takes its longer history"}
        reply = self._adopt(seat)
        if reply["status"] != "upload":
            self.open.clear()  # whoever asks for a slot is told that it is behind
        return reply

    def _adopt(self, seat: Seat) -> dict[str, Any]:
        """Make the island's state, where its history is the longer one, the hub's; it has to bring the tensors."""
        assert self.terms is not None
        founding = self.state is None
        state = self.state or self.terms.blank()
        before = [held.lineage for held in state.states]
        if missing := self._arrivals.adopt(seat.member, state, seat.state, founding):
            return {"status": "upload", "missing": missing}
        if founding:
            for founder in self.seats.of(Phase.JOINING):
                founder.founder, founder.first = True, state.slot
            self._merger = self.workshop.merger(self.terms)
        for i, (held, old) in enumerate(zip(state.states, before, strict=True)):
            if held.lineage != old:  # what the hub's encoding had lost on the way there, nobody knows
                self._merger.reset(i)
        self.state = state
        self._save()
        return self._resume(seat)

    def _save(self, at_once: bool = False) -> None:
        assert self.terms is not None and self.state is not None
        what = self.terms, self.state.copy(), list(self.records.values()), self._merger.residuals()
        self.store.save(Snapshot(*what), at_once)

    def finish(self) -> None:
        """The hub ends in good order: all that it holds is to be saved. Raises Fenced."""
        if self.state is not None:
            self._save(at_once=True)

    def bring(self, member: Member, name: str) -> Upload:
        """Where a tensor of the state that ``join`` asked for goes. Raises Refusal."""
        return self._arrivals.of(self.seats[member].member, name)

    def _offer_state(self, seat: Seat) -> dict[str, Any]:
        seat.offered = True
        return {"status": "take"} | self.shelve(seat.member)

    def shelve(self, member: Member) -> dict[str, Any]:
        """The present state, described; its tensors can be had from ``shelf`` by its key. Raises Refusal.

        settled: no slot is open that this island takes no part in, so it need not take the state again before its first.
        """
        seat = self.seats[member]
        if not seat.offered:
            raise Refusal("stranger", f"island {member.island} has not been offered the run's state yet")
        assert self.state is not None
        return {
            "settled": not any(number < seat.first for number in self.open),
            "key": self.shelf.put(self.state, member),
            "state": self.state.describe(),
            "tensors": sorted(self.state.tensors()),
            "step": self.step,
            "present": sorted(self.seats.members),
        }

    @property
    def step(self) -> int:
        """Where in run progress the furthest island stands."""
        seats = self.seats.of(Phase.MEMBER) + self.seats.of(Phase.JOINING)
        # The islands that were there when a hub was started anew may be gone.
        slots = self.terms.clock().due(self.state.slot - 1) if self.terms and self.state else 0
        return max([slots, *(seat.step for seat in seats)])

    def _step_for(self, seat: Seat) -> int:
        """Where a joiner starts: beside the others, who would else wait for it, but before its first slot."""
        if seat.founder:
            return self.step
        assert self.terms is not None
        now = max((each.expected(self.now()) for each in self.seats.members.values()), default=0)
        return max(self.step, min(now, self.terms.clock().due(seat.first) - 1))

    def _members(self) -> list[int]:
        return sorted(self.seats.members.keys() | self._recovery.returning)

    def _drop(self, seat: Seat) -> None:
        self._arrivals.drop(seat.member)
        self._recovery.back(seat.member.island)
        for slot in self.open.values():
            slot.drop(seat.member)
        self.open = {number: slot for number, slot in self.open.items() if slot.headers or slot.merging}
        self._forget()
        self._look()

    # ---- slots -----------------------------------------------------------------------------------------------------

    def announce(self, member: Member, header: Header) -> dict[str, Any]:
        """What an island says about its contribution to a slot. Returns what ``outcome`` does. Raises Refusal."""
        seat = self._member(member)
        assert self.state is not None and self.terms is not None
        if header.island != member.island:
            raise Refusal("malformed", f"the header is island {header.island}'s")
        if not 0 <= header.slot < self.terms.clock().slots:
            raise Refusal(
                "malformed", f"the run has {self.terms.clock().slots} slots, none of number {header.slot}"
            )
        if header.fragment != header.slot % len(self.state.states):
            raise Refusal(
                "malformed", f"slot {header.slot} exchanges another fragment than {header.fragment}"
            )
        self._withdrawn.discard((header.slot, member))
        seat.excused = False
        if header.slot >= self.state.slot and header.slot not in self.records:
            slot = self.open.setdefault(header.slot, Open(header.slot, header.fragment, self.now()))
            if slot.roll is None:
                slot.hear(member, header)
                self._look()
        return self.outcome(seat.member, header.slot)

    def upload(self, member: Member, number: int, nbytes: int | None = None) -> Upload:
        """Where the payload of a contribution goes, of so many bytes as the island says. Raises Refusal when it is not, or no
        longer, wanted."""
        self._member(member)
        slot = self.open.get(number)
        if slot is None or slot.merging or member not in slot.headers:
            raise Refusal("gone", f"slot {number} takes no payload from island {member.island}")
        expected = sum(self._merger.sizes(slot.fragment))
        if nbytes not in (None, expected):
            raise Refusal("malformed", f"a payload of slot {number} has {expected} bytes, not {nbytes}")
        if member not in slot.uploads:
            slot.uploads[member] = self.workshop.upload("payload", slot.fragment, expected, member)
        return slot.uploads[member]

    def outcome(self, member: Member, number: int) -> dict[str, Any]:
        """How a slot ended for this island, or how it stands. Raises Refusal.

        status: "committed" or "failed", with the fields of a ``Record``; "behind": the island has to heal; "withdrawn";
        "unknown": the hub has not heard of it from this island; "open": with the phase, the islands it needs something
        from, and the ranges of this island's payload that are missing.
        """
        self._member(member)
        assert self.state is not None
        record, slot = self.records.get(number), self.open.get(number)
        if record is not None:
            if member.island in record.takers:
                return record.to_json()
            return {"status": "behind", "reason": "the slot was settled without this island"}
        if (number, member) in self._withdrawn:
            return {"status": "withdrawn"}
        if number < self.state.slot:
            return {"status": "behind", "reason": "the run is past the slot"}
        if slot is None:
            return {"status": "unknown"}
        return slot.standing(member, self._unheard(slot), sum(self._merger.sizes(slot.fragment)))

    def payload(self, member: Member, number: int) -> torch.Tensor:
        """The encoded merged delta of a committed slot. Raises Refusal."""
        self._member(member)
        if number not in self.payloads:
            raise Refusal("gone", f"the result of slot {number} is no longer held")
        return self.payloads[number]

    def withdraw(self, member: Member, number: int) -> dict[str, Any]:
        """The island leaves a slot, if it is not too late; returns what ``outcome`` does. Raises Refusal."""
        self._member(member)
        slot = self.open.get(number)
        if slot is not None and not slot.merging:
            slot.headers.pop(member, None)
            slot.uploads.pop(member, None)
            slot.roll = None
            self._withdrawn.add((number, member))
            if not slot.headers:
                del self.open[number]
            self._look()
        return self.outcome(member, number)

    def _member(self, member: Member) -> Seat:
        seat = self.seats[member]
        if seat.phase is not Phase.MEMBER:
            raise Refusal("stranger", f"island {member.island} has not been admitted")
        return seat

    def _unheard(self, slot: Open) -> list[int]:
        """Islands that the roll waits for."""
        heard = {member.island for member in slot.headers}
        gone_on = {member.island for number, member in self._withdrawn if number == slot.slot}
        awaited = self._recovery.returning | set(self.seats.awaited(slot.slot))
        return sorted(awaited - heard - gone_on)

    def _look(self) -> None:
        """Call the roll of the oldest open slot, if everybody has said something; slots are settled in their order."""
        slot = self.open.get(min(self.open, default=-1))
        if slot is None or slot.roll is not None:
            return
        unheard = self._unheard(slot)
        every = self.terms.settings["semi_sync.sync_every"] if self.terms else 0
        patience_s = self.rules.patience_s(self.seats.window_s(unheard, every))
        if unheard and self.now() - slot.began >= patience_s:
            self.seats.excuse(unheard)
            unheard = []
        if not unheard:
            self._call(slot)

    def _call(self, slot: Open) -> None:
        assert self.state is not None and self.terms is not None
        weight = self.terms.settings["semi_sync.merge.weight"]
        current, reason = slot.call(self.state.states[slot.fragment], weight)
        if reason:
            self._settle(slot, Record(slot.slot, "failed", takers=current, reason=reason))

    def take_job(self) -> Job | None:
        """The next merge, if its payloads are here. The caller runs it and gives it to ``done``."""
        if self.state is None or not self.open or any(slot.merging for slot in self.open.values()):
            return None
        slot = self.open[min(self.open)]
        if slot.roll is None or slot.uploading():
            return None
        slot.merging = True
        contributions = slot.take()
        return self.workshop.job(slot.slot, slot.fragment, contributions, self._merger, self.state)

    def done(self, job: Job) -> None:
        """A merge has been made: commit it."""
        slot = self.open[job.slot]
        assert slot.roll is not None and job.advance is not None and job.payload is not None
        assert self.state is not None and self.terms is not None
        if not job.advance.finite:
            self._merger.settle(job.fragment, job.slot, committed=False)
            reason = "the outer step is not finite"
            self._settle(slot, Record(slot.slot, "failed", takers=slot.roll.members, reason=reason))
            return
        record = slot.committed(job, tuple(sorted(self.seats.members)))
        self._merger.settle(job.fragment, job.slot, committed=True)
        # It is on the disk before anybody can learn of it: after a crash no version is made a second time.
        self.store.commit(record, self._members())
        self.state.commit(
            record.slot, job.fragment, job.advance, list(record.participants), record.tokens, record.advanced,
            record.members,
        )  # fmt: skip
        self.payloads[record.slot] = job.payload
        self._settle(slot, record)
        self._save()

    def _settle(self, slot: Open, record: Record) -> None:
        assert self.state is not None
        if record.status == "failed":
            self.store.commit(record, self._members())
            self.state.fail(record.slot)
        self.records[record.slot] = record
        del self.open[slot.slot]
        self._forget()
        self._look()

    def _forget(self) -> None:
        """Let go of what nobody can ask for any more."""
        needed = min((seat.slot for seat in self.seats.members.values()), default=None)
        self.payloads = {s: p for s, p in self.payloads.items() if needed is not None and s >= needed}
        oldest = max(self.records, default=0) - REMEMBERED
        self.records = {s: r for s, r in self.records.items() if s > oldest}
        self._withdrawn = {(s, m) for s, m in self._withdrawn if s > oldest}
