"""The slot protocol of one island as a state machine without I/O: header, bulk, confirm, and what to do when it breaks.

A transport feeds it events (an offer, a message, a new membership epoch, the bulk's end, the passing of time) and carries
out the effects it returns. The same code runs over real sockets and in the in-memory harness.

An *attempt* is (slot, epoch). It commits on an island only when every member of the roll confirmed the same digest.
An island that sent its confirmation cannot know whether others saw all of them, so from then on it may not simply give
up: if a member of the attempt is lost, the lowest surviving member asks all others and decides (committed if anybody
committed, otherwise nobody did, since those asked accept no late confirmation). Before its confirmation an island is free
to leave; a void attempt is tried again under the next epoch, at most ``MAX_TRIES`` times, then the slot has failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from torchtitan_diloco.exchange.attempt import Abandon, Bulk, Effect, Finished, Offer, Phase, Renew, Send
from torchtitan_diloco.exchange.messages import (
    Announce,
    Answer,
    Ask,
    Confirm,
    Epoch,
    Member,
    Message,
    Outcome,
)
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.policy import Header, call_roll

MAX_TRIES = 3
REMEMBERED = 64  # slots whose outcome is kept for those who ask late

Merge = Callable[[Sequence[Contribution]], tuple[torch.Tensor, list[float]]]


class SlotProtocol:
    """One island's side of the exchange. Not thread-safe: one thread feeds it."""

    def __init__(self, me: Member, merge: Merge) -> None:
        self.me = me
        self.merge = merge
        self.epoch: Epoch | None = None
        self.serial = 0
        self.current: Offer | None = None
        self.committed: dict[int, tuple[str, str]] = {}  # slot -> (epoch, digest)
        self.failed: set[int] = set()
        self.void: set[tuple[int, str]] = set()
        self.headers: dict[tuple[int, str], dict[Member, Announce]] = {}

    # ---- events ----------------------------------------------------------------------------------------------------

    def offer(self, header: Header, payload: torch.Tensor) -> list[Effect]:
        """Start on a slot. payload: 1-D, this island's delta."""
        assert self.current is None, f"slot {header.slot} offered while slot {self.current.slot} is open"
        self.current = Offer(header, payload)
        return self._announce()

    def enter(self, epoch: Epoch) -> list[Effect]:
        """The membership has changed."""
        if self.epoch is not None and epoch.id == self.epoch.id:
            return []
        self.epoch = epoch
        offer = self.current
        if offer is None:
            return []
        if offer.phase in (Phase.HEADERS, Phase.BULK):
            return self._restart()
        if offer.phase is Phase.CONFIRM and all(m in epoch.members for m in offer.others(self.me)):
            return []  # a newcomer: the attempt's own members still settle it
        return self._resolve()

    def receive(self, sender: Member, message: Message) -> list[Effect]:
        """A message of another member; it may be late, early, repeated or about an attempt long gone."""
        if isinstance(message, Announce):
            return self._on_announce(sender, message)
        if isinstance(message, Confirm):
            return self._on_confirm(sender, message)
        if isinstance(message, Ask):
            return self._on_ask(sender, message)
        return self._on_answer(sender, message)

    def bulk_done(self, attempt: tuple[int, str], payloads: Mapping[int, torch.Tensor]) -> list[Effect]:
        """All payloads of the attempt are here, by island."""
        offer = self._open(attempt)
        if offer is None or offer.phase is not Phase.BULK:
            return []
        assert offer.roll is not None
        headers = {m.island: a.header for m, a in self.headers[attempt].items()}
        merged, weights = self.merge(
            [
                Contribution(i, headers[i].steps, headers[i].tokens, payloads[i])
                for i in offer.roll.contributors
            ]
        )
        offer.merged, offer.weights, offer.digest = merged, tuple(weights), digest(merged)
        offer.phase = Phase.CONFIRM
        offer.confirms[self.me.island] = offer.digest
        return [*self._tell(Confirm(attempt[1], attempt[0], offer.digest)), *self._settle()]

    def bulk_failed(self, attempt: tuple[int, str], reason: str) -> list[Effect]:
        """The payloads could not be exchanged; this island has not confirmed, so nobody can have committed."""
        offer = self._open(attempt)
        if offer is None or offer.phase is not Phase.BULK:
            return []
        told = self._tell(Confirm(attempt[1], attempt[0], None, reason))
        return [*told, *self._void(reason), Renew()]

    def withdraw(self) -> list[Effect]:
        """Give the open slot up because this island is about to leave; no effect once it has confirmed."""
        offer = self.current
        if offer is None or offer.phase in (Phase.CONFIRM, Phase.RESOLVE):
            return []
        effects: list[Effect] = []
        if offer.epoch is not None:
            attempt = (offer.slot, offer.epoch.id)
            self.void.add(attempt)
            if offer.phase is Phase.BULK:
                effects = [
                    Abandon(attempt),
                    *self._tell(Confirm(attempt[1], attempt[0], None, "island withdrew")),
                ]
        return [*effects, *self._finish(Outcome(offer.slot, "withdrawn", reason="asked to stop"))]

    def tick(self) -> list[Effect]:
        """Time has passed: say again what may have been lost. Everything sent is safe to repeat."""
        offer = self.current
        if offer is None or offer.epoch is None:
            return []
        if offer.phase in (Phase.HEADERS, Phase.BULK):
            return self._tell(self._announcement(offer))
        if offer.phase is Phase.CONFIRM:
            return self._tell(Confirm(offer.epoch.id, offer.slot, offer.digest))
        return self._resolve()

    def waiting_for(self) -> list[int]:
        """The islands whose next message this island needs."""
        offer = self.current
        if offer is None or offer.epoch is None:
            return []
        others = [m.island for m in offer.others(self.me)]
        if offer.phase is Phase.HEADERS:
            heard = {m.island for m in self.headers.get((offer.slot, offer.epoch.id), {})}
            return [i for i in others if i not in heard]
        if offer.phase is Phase.CONFIRM:
            return [i for i in others if i not in offer.confirms]
        return others

    # ---- messages --------------------------------------------------------------------------------------------------

    def _on_announce(self, sender: Member, message: Announce) -> list[Effect]:
        slot, key = message.slot, (message.slot, message.epoch)
        if slot in self.committed or slot in self.failed:
            return [Send(sender, self._answer(slot, message.epoch))]
        if key in self.void:
            return []
        self.headers.setdefault(key, {})[sender] = message
        offer = self.current
        if offer is None or offer.epoch is None:
            return []
        if slot > offer.slot and message.epoch == offer.epoch.id and offer.phase is Phase.HEADERS:
            # A member that is past our slot will never attempt it, and may not remember how it ended.
            if message.header.lineage == offer.header.lineage:
                return self._fail(f"island {sender.island} is past it")
            return self._finish(Outcome(offer.slot, "behind", reason=f"island {sender.island} is past it"))
        if slot != offer.slot:
            return []
        if message.epoch != offer.epoch.id and offer.phase in (Phase.BULK, Phase.CONFIRM):
            # Whoever announces under a later epoch has left this attempt; without its confirmation it is void.
            joined = self.headers.get((slot, offer.epoch.id), {}).get(sender)
            if joined is not None and message.serial > joined.serial and sender.island not in offer.confirms:
                return self._void(f"island {sender.island} has left the attempt")
        return self._count_headers()

    def _on_confirm(self, sender: Member, message: Confirm) -> list[Effect]:
        slot, attempt = message.slot, (message.slot, message.epoch)
        offer = self._open(attempt)
        if offer is None:
            settled = slot in self.committed or slot in self.failed or attempt in self.void
            return [Send(sender, self._answer(slot, message.epoch))] if settled and message.digest else []
        if message.digest is None:
            return self._void(message.reason)
        offer.confirms[sender.island] = message.digest
        return self._settle() if offer.phase is Phase.CONFIRM else []

    def _on_ask(self, sender: Member, message: Ask) -> list[Effect]:
        attempt = (message.slot, message.epoch)
        offer = self._open(attempt)
        if offer is not None and offer.phase in (Phase.CONFIRM, Phase.RESOLVE):
            effects = self._resolve() if offer.phase is Phase.CONFIRM else []
            status = self._answer(*attempt)
            return [Send(sender, status), *effects]
        effects = []
        if offer is not None:  # not confirmed yet: promise never to
            effects = [*self._void(f"island {sender.island} lost a member"), Renew()]
        elif message.slot not in self.committed and message.slot not in self.failed:
            self.void.add(attempt)
        return [Send(sender, self._answer(*attempt)), *effects]

    def _on_answer(self, sender: Member, message: Answer) -> list[Effect]:
        offer = self.current
        if offer is None or offer.slot != message.slot:
            return []
        if message.status == "behind":
            return self._finish(
                Outcome(offer.slot, "behind", reason=f"committed without us by island {sender.island}")
            )
        if message.status == "failed":
            if offer.phase is Phase.HEADERS:
                return self._fail(f"given up by island {sender.island}")
            return self._void(f"given up by island {sender.island}")
        if offer.epoch is None or message.epoch != offer.epoch.id:
            return []
        if offer.phase not in (Phase.CONFIRM, Phase.RESOLVE):
            return []
        if message.status == "committed":
            return self._commit(message.digest)
        if message.status == "void":
            return self._void(f"island {sender.island} did not confirm")
        offer.answers.add(sender.island)
        return self._resolve() if offer.phase is Phase.RESOLVE and self._coordinates(offer) else []

    def _answer(self, slot: int, epoch: str) -> Answer:
        if slot in self.committed:
            by, value = self.committed[slot]
            return Answer(epoch, slot, "committed", value) if by == epoch else Answer(epoch, slot, "behind")
        if slot in self.failed:
            return Answer(epoch, slot, "failed")
        return Answer(epoch, slot, "undecided" if self._open((slot, epoch)) else "void")

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _open(self, attempt: tuple[int, str]) -> Offer | None:
        """The current offer, if it is this attempt."""
        offer = self.current
        if offer is None or offer.epoch is None or (offer.slot, offer.epoch.id) != attempt:
            return None
        return offer

    def _tell(self, message: Message) -> list[Effect]:
        assert self.current is not None
        return [Send(member, message) for member in self.current.others(self.me)]

    def _announcement(self, offer: Offer) -> Announce:
        assert offer.epoch is not None
        return Announce(offer.epoch.id, offer.slot, self.serial, offer.header)

    def _announce(self) -> list[Effect]:
        """Begin an attempt under the present epoch, if there is one that is still good for this slot."""
        offer = self.current
        assert offer is not None
        offer.epoch = offer.roll = None
        offer.phase = Phase.HEADERS
        offer.confirms, offer.answers = {}, set()
        epoch = self.epoch
        if epoch is None or self.me not in epoch.members or (offer.slot, epoch.id) in self.void:
            return []
        offer.epoch = epoch
        self.serial += 1
        announcement = self._announcement(offer)
        self.headers.setdefault((offer.slot, epoch.id), {})[self.me] = announcement
        return [*self._tell(announcement), *self._count_headers()]

    def _count_headers(self) -> list[Effect]:
        offer = self.current
        if offer is None or offer.epoch is None or offer.phase is not Phase.HEADERS:
            return []
        attempt = (offer.slot, offer.epoch.id)
        heard = self.headers[attempt]
        if any(member not in heard for member in offer.epoch.members):
            return []
        roll = call_roll({m.island: heard[m].header for m in offer.epoch.members})
        if self.me.island in roll.behind:
            return self._finish(Outcome(offer.slot, "behind", reason="others hold a longer history"))
        if not roll.contributors:
            return self._fail("no island has a finite delta")
        offer.roll = roll
        offer.phase = Phase.BULK
        offer.tries += 1
        members = tuple(m for m in offer.epoch.members if m.island in roll.members)
        return [Bulk(attempt, members, offer.payload)]

    def _settle(self) -> list[Effect]:
        """Commit when every member of the roll has confirmed. The lowest island's digest is the reference."""
        offer = self.current
        assert offer is not None and offer.roll is not None
        if any(island not in offer.confirms for island in offer.roll.members):
            return []
        return self._commit(offer.confirms[offer.roll.members[0]])

    def _commit(self, value: str) -> list[Effect]:
        offer = self.current
        assert offer is not None and offer.roll is not None and offer.epoch is not None
        self.committed[offer.slot] = (offer.epoch.id, value)
        if value != offer.digest:
            return self._finish(
                Outcome(offer.slot, "behind", reason="our merged bits differ from the reference's")
            )
        heard = {m.island: a.header for m, a in self.headers[(offer.slot, offer.epoch.id)].items()}
        contributors = offer.roll.contributors
        return self._finish(
            Outcome(
                offer.slot,
                "committed",
                merged=offer.merged,
                participants=contributors,
                weights=offer.weights,
                tokens=sum(heard[i].tokens for i in contributors),
                positions={i: heard[i].positions for i in (*contributors, *offer.roll.skipped)},
                skipped={i: heard[i].skipped for i in contributors}
                | {i: heard[i].positions for i in offer.roll.skipped},
                members={i: heard[i].holds for i in offer.roll.members},
                contested=offer.roll.contested,
            )
        )

    def _fail(self, reason: str) -> list[Effect]:
        assert self.current is not None
        self.failed.add(self.current.slot)
        return self._finish(Outcome(self.current.slot, "failed", reason=reason))

    def _finish(self, outcome: Outcome) -> list[Effect]:
        self.current = None
        floor = outcome.slot - REMEMBERED
        self.committed = {s: v for s, v in self.committed.items() if s > floor}
        self.failed = {s for s in self.failed if s > floor}
        self.void = {a for a in self.void if a[0] > floor}
        self.headers = {a: h for a, h in self.headers.items() if a[0] > outcome.slot}
        present = self.epoch.islands() if self.epoch is not None else (self.me.island,)
        return [Finished(replace(outcome, present=present))]

    def _void(self, reason: str) -> list[Effect]:
        """The present attempt will never commit: try again under another epoch, or give the slot up."""
        offer = self.current
        assert offer is not None and offer.epoch is not None
        attempt = (offer.slot, offer.epoch.id)
        self.void.add(attempt)
        gone: list[Effect] = [Abandon(attempt)] if offer.phase is Phase.BULK else []
        if offer.tries >= MAX_TRIES:
            return [*gone, *self._fail(f"{reason} ({offer.tries} tries)")]
        return [*gone, *self._announce()]

    def _restart(self) -> list[Effect]:
        """Leave an unconfirmed attempt for the new epoch."""
        offer = self.current
        assert offer is not None
        gone: list[Effect] = []
        if offer.epoch is not None:
            attempt = (offer.slot, offer.epoch.id)
            self.void.add(attempt)
            gone = [Abandon(attempt)] if offer.phase is Phase.BULK else []
        return [*gone, *self._announce()]

    # ---- unknown outcome -------------------------------------------------------------------------------------------

    def _survivors(self, offer: Offer) -> list[Member]:
        assert self.epoch is not None
        return [m for m in offer.others(self.me) if m in self.epoch.members]

    def _coordinates(self, offer: Offer) -> bool:
        return all(self.me < member for member in self._survivors(offer))

    def _resolve(self) -> list[Effect]:
        """Confirmed, but a member is lost: find out, or as lowest survivor decide, whether the attempt was committed."""
        offer = self.current
        assert offer is not None and offer.epoch is not None
        offer.phase = Phase.RESOLVE
        ask = Ask(offer.epoch.id, offer.slot)
        survivors = self._survivors(offer)
        if not self._coordinates(offer):
            return [Send(survivors[0], ask)]
        missing = [m for m in survivors if m.island not in offer.answers]
        if missing:
            return [Send(member, ask) for member in missing]
        return self._void("a member was lost before all had confirmed")
