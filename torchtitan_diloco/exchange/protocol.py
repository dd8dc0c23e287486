"""The slot protocol of one island as a state machine without I/O: header, bulk, confirm, and what to do when it breaks.

A transport feeds it events (an offer, a message, a new membership epoch, the bulk's end, the passing of time) and carries
out the effects it returns. The same code runs over real sockets and in the in-memory harness.

An *attempt* is (slot, epoch). It commits on an island only when every member of the roll confirmed the same digest.
An island that sent its confirmation cannot know whether others saw all of them, so from then on it may not simply give
up: if a member of the attempt is lost, the lowest surviving member asks all others and decides (committed if anybody
committed, otherwise nobody did, since those asked accept no late confirmation). Before its confirmation an island is free
to leave; a void attempt is tried again under the next epoch. Once its bulk was begun ``MAX_TRIES`` times, a slot fails
with the next thing that breaks; changes of membership alone never fail it.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from torchtitan_diloco.exchange.attempt import Abandon, Effect, Finished, Offer, Phase, Renew, Send
from torchtitan_diloco.exchange.deal import Merge, first_bulk, second_bulk
from torchtitan_diloco.exchange.messages import Announce, Answer, Ask, Confirm, Epoch, Message, Outcome
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.policy import Header, Member, call_roll
from torchtitan_diloco.outer.state import OuterStep

MAX_TRIES = 3
REMEMBERED = 64  # slots whose outcome is kept for those who ask late


class SlotProtocol:
    """One island's side of the exchange, with any number of slots open at once. Not thread-safe: one thread feeds it."""

    def __init__(self, me: Member, merge: Merge) -> None:
        self.me = me
        self.merge = merge
        self.epoch: Epoch | None = None
        self.serial = 0
        self.offers: dict[int, Offer] = {}
        self.floor = 0  # slots below it were settled here, or passed before this island came
        self.committed: dict[int, tuple[str, str]] = {}  # slot -> (epoch, digest)
        self.failed: set[int] = set()
        self.behind: set[int] = set()  # slots to be offered again, unless healing takes this island past them
        self.void: set[tuple[int, str]] = set()
        self.headers: dict[tuple[int, str], dict[Member, Announce]] = {}

    # ---- events ----------------------------------------------------------------------------------------------------

    def offer(self, header: Header, payload: torch.Tensor, outer_step: OuterStep) -> list[Effect]:
        """Start on a slot. payload: 1-D, this island's encoded delta. A slot it was behind in may be offered again."""
        assert header.slot not in self.offers
        self.offers[header.slot] = offer = Offer(header, payload, outer_step)
        self.behind.discard(header.slot)
        self.floor = self._oldest(header.slot)
        return self._announce(offer)

    def enter(self, epoch: Epoch) -> list[Effect]:
        """The membership has changed."""
        if self.epoch is not None and epoch.id == self.epoch.id:
            return []
        self.epoch = epoch
        effects: list[Effect] = []
        for offer in list(self.offers.values()):
            if offer.phase in (Phase.HEADERS, Phase.BULK):
                effects += self._restart(offer)
            elif offer.phase is Phase.RESOLVE or not all(m in epoch.members for m in offer.others(self.me)):
                effects += self._resolve(offer)
            # Else a newcomer: the members of a confirmed attempt still settle it among themselves.
        return effects

    def receive(self, sender: Member, message: Message) -> list[Effect]:
        """A message of another member; it may be late, early, repeated or about an attempt long gone."""
        if isinstance(message, Announce):
            return self._on_announce(sender, message)
        if isinstance(message, Confirm):
            return self._on_confirm(sender, message)
        if isinstance(message, Ask):
            return self._on_ask(sender, message)
        return self._on_answer(sender, message)

    def bulk_done(self, attempt: tuple[int, str], payloads: dict[int, torch.Tensor]) -> list[Effect]:
        """What the other members have sent in the stage of the attempt's bulk is here, by island; so is its own part.

        payloads: used up, but for its own.
        """
        offer = self._open(attempt)
        if offer is None or offer.phase is not Phase.BULK:
            return []
        fragment = offer.header.fragment
        if offer.division is None:
            merged, weights = self.merge(fragment, self._contributions(offer, payloads))
        elif offer.stage == "slices":
            mine = offer.division.of(self.me.island)
            part, weights = self.merge.own(fragment, offer.slot, mine, self._contributions(offer, payloads))
            offer.weights = tuple(weights)  # the headers', so known to those who own nothing as well
            return [second_bulk(offer, part)]
        else:
            merged, weights = self.merge.decode(fragment, offer.division.join(payloads)), [*offer.weights]
        advance = offer.outer_step(merged)
        if not advance.finite:  # the same bytes everywhere, so everybody sees it
            return self._fail(offer, "the outer step is not finite")
        offer.advance, offer.weights, offer.digest = (
            advance,
            tuple(weights),
            f"{advance.digest} {advance.merged}",
        )
        offer.phase = Phase.CONFIRM
        offer.confirms[self.me.island] = offer.digest
        return [*self._tell(offer, Confirm(attempt[1], attempt[0], offer.digest)), *self._settle(offer)]

    def bulk_failed(self, attempt: tuple[int, str], reason: str) -> list[Effect]:
        """The payloads could not be exchanged; this island has not confirmed, so nobody can have committed."""
        offer = self._open(attempt)
        if offer is None or offer.phase is not Phase.BULK:
            return []
        told = self._tell(offer, Confirm(attempt[1], attempt[0], None, reason))
        return [*told, *self._void(offer, reason)]

    def lost_touch(self, reason: str) -> list[Effect]:
        """This island was frozen or cut off for so long that the others may have gone on without it.

        Their confirmations from before may still come: what it has not confirmed is left, the rest is asked after."""
        effects: list[Effect] = []
        for offer in list(self.offers.values()):
            if offer.phase in (Phase.CONFIRM, Phase.RESOLVE):
                effects += self._resolve(offer)
            elif offer.epoch is not None:
                left = Confirm(offer.epoch.id, offer.slot, None, reason)
                effects += [*self._tell(offer, left), *self._void(offer, reason)]
        return effects

    def withdraw(self) -> list[Effect]:
        """Give up the open slots because this island is about to leave; those it has confirmed must still be settled."""
        effects: list[Effect] = []
        for offer in list(self.offers.values()):
            if offer.phase in (Phase.CONFIRM, Phase.RESOLVE):
                continue
            effects += self._leave(offer, "island withdrew")
            effects += self._finish(Outcome(offer.slot, "withdrawn", reason="asked to stop"))
        return effects

    def skip_to(self, slot: int) -> list[Effect]:
        """This island's state is that after all slots below ``slot``, by whatever way; it will not attempt them any more."""
        effects: list[Effect] = []
        for offer in [o for o in self.offers.values() if o.slot < slot and o.phase is Phase.HEADERS]:
            effects += self._finish(Outcome(offer.slot, "behind", reason="this island's state is past it"))
        self.behind = {s for s in self.behind if s >= slot}
        self.floor = max(self.floor, self._oldest(slot))
        return effects

    def tick(self) -> list[Effect]:
        """Time has passed: say again what may have been lost. Everything sent is safe to repeat."""
        effects: list[Effect] = []
        for offer in list(self.offers.values()):
            if offer.epoch is None:
                offer.waits += 1
                if offer.waits > 1:  # the epoch that was on its way has not come: ask for one, or ask again
                    effects += self._announce(offer)
            elif offer.phase in (Phase.HEADERS, Phase.BULK):
                effects += self._tell(offer, self._announcement(offer))
            elif offer.phase is Phase.CONFIRM:
                effects += self._tell(offer, Confirm(offer.epoch.id, offer.slot, offer.digest))
            else:
                effects += self._resolve(offer)
        return effects

    def waiting_for(self) -> tuple[Offer, list[int]] | None:
        """The oldest open slot, and the islands whose next message it needs."""
        offer = next(iter(self.offers.values()), None)
        if offer is None:
            return None
        if offer.epoch is None:
            return offer, []
        others = [m.island for m in offer.others(self.me)]
        if offer.phase is Phase.HEADERS:
            heard = {m.island for m in self.headers.get((offer.slot, offer.epoch.id), {})}
            return offer, [i for i in others if i not in heard]
        if offer.phase is Phase.CONFIRM:
            return offer, [i for i in others if i not in offer.confirms]
        return offer, others

    def first_with(self, member: Member) -> int:
        """The first slot that ``member`` may take part in: all below are settled, or confirmed and settled without it."""
        without = [
            offer.slot + 1
            for offer in self.offers.values()
            if offer.phase in (Phase.CONFIRM, Phase.RESOLVE) and member not in offer.others(self.me)
        ]
        return max([self.floor, *without])

    # ---- messages --------------------------------------------------------------------------------------------------

    def _on_announce(self, sender: Member, message: Announce) -> list[Effect]:
        slot, key = message.slot, (message.slot, message.epoch)
        passed = self._passed_by(sender, message)
        if slot in self.committed or slot in self.failed:
            return [*passed, Send(sender, self._answer(slot, message.epoch))]
        if slot < self.floor:  # settled here, and forgotten
            return [*passed, Send(sender, Answer(message.epoch, slot, "void"))]
        if key in self.void:
            return passed
        self.headers.setdefault(key, {})[sender] = message
        offer = self.offers.get(slot)
        if offer is None or offer.epoch is None:
            return passed
        if message.epoch != offer.epoch.id and offer.phase in (Phase.BULK, Phase.CONFIRM):
            # Whoever announces under a later epoch has left this attempt; without its confirmation it is void.
            joined = self.headers.get((slot, offer.epoch.id), {}).get(sender)
            if joined is not None and message.serial > joined.serial and sender.island not in offer.confirms:
                left = self._void(offer, f"island {sender.island} has left the attempt")
                # The later epoch comes here as well. Another one, asked for by each, would cost other open slots a try.
                return [*passed, *(effect for effect in left if not isinstance(effect, Renew))]
        return [*passed, *self._count_headers(offer)]

    def _passed_by(self, sender: Member, message: Announce) -> list[Effect]:
        """Open slots below the sender's floor: it will never attempt them, and may not remember how they ended."""
        effects: list[Effect] = []
        for offer in list(self.offers.values()):
            if offer.slot >= message.floor or offer.phase is not Phase.HEADERS:
                continue
            if offer.epoch is None or offer.epoch.id != message.epoch:
                continue
            effects.append(Send(sender, Ask(offer.epoch.id, offer.slot)))
        return effects

    def _on_confirm(self, sender: Member, message: Confirm) -> list[Effect]:
        slot, attempt = message.slot, (message.slot, message.epoch)
        offer = self._open(attempt)
        if offer is None:
            settled = slot in self.committed or slot in self.failed or attempt in self.void
            return [Send(sender, self._answer(slot, message.epoch))] if settled and message.digest else []
        if message.digest is None:
            return self._void(offer, message.reason)
        offer.confirms[sender.island] = message.digest
        return self._settle(offer) if offer.phase is Phase.CONFIRM else []

    def _on_ask(self, sender: Member, message: Ask) -> list[Effect]:
        attempt = (message.slot, message.epoch)
        offer = self._open(attempt)
        if offer is not None and offer.phase in (Phase.CONFIRM, Phase.RESOLVE):
            effects = self._resolve(offer) if offer.phase is Phase.CONFIRM else []
            return [Send(sender, self._answer(*attempt)), *effects]
        effects = []
        if offer is not None:  # not confirmed yet: promise never to
            effects = self._void(offer, f"island {sender.island} lost a member")
        elif message.slot not in self.committed and message.slot not in self.failed:
            self.void.add(attempt)
        return [Send(sender, self._answer(*attempt)), *effects]

    def _on_answer(self, sender: Member, message: Answer) -> list[Effect]:
        offer = self.offers.get(message.slot)
        if offer is None or self.epoch is None or sender not in self.epoch.members:
            return []  # what a member knew that is gone is gone with it
        if message.status == "behind":
            reason = f"committed without us by island {sender.island}"
            left = self._leave(offer, "island is behind") if offer.phase is Phase.BULK else []
            return [*left, *self._finish(Outcome(offer.slot, "behind", reason=reason))]
        if message.status == "failed":
            if offer.phase is Phase.HEADERS:
                return self._fail(offer, f"given up by island {sender.island}")
            return self._void(offer, f"given up by island {sender.island}")
        if offer.epoch is None or message.epoch != offer.epoch.id:
            return []
        if offer.phase is Phase.HEADERS and message.status in ("void", "committed"):
            # Only ever asked of one that is past the slot; committed by a roll that left this island out.
            how = "past it and does not remember it" if message.status == "void" else "past it without us"
            return self._finish(Outcome(offer.slot, "behind", reason=f"island {sender.island} is {how}"))
        if offer.phase not in (Phase.CONFIRM, Phase.RESOLVE):
            return []
        if message.status == "committed":
            return self._commit(offer, message.digest)
        if message.status == "void":
            return self._void(offer, f"island {sender.island} did not confirm")
        offer.answers.add(sender.island)
        return self._resolve(offer) if offer.phase is Phase.RESOLVE and self._coordinates(offer) else []

    def _answer(self, slot: int, epoch: str) -> Answer:
        if slot in self.committed:
            by, value = self.committed[slot]
            return Answer(epoch, slot, "committed", value) if by == epoch else Answer(epoch, slot, "behind")
        if slot in self.failed:
            return Answer(epoch, slot, "failed")
        return Answer(epoch, slot, "undecided" if self._open((slot, epoch)) else "void")

    def _oldest(self, slot: int) -> int:
        """The first slot, at most ``slot``, that is not over for this island."""
        return min([*self.offers, *self.behind, slot])

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _open(self, attempt: tuple[int, str]) -> Offer | None:
        """The open offer whose present attempt this is."""
        offer = self.offers.get(attempt[0])
        return (
            offer if offer is not None and offer.epoch is not None and offer.epoch.id == attempt[1] else None
        )

    def _tell(self, offer: Offer, message: Message) -> list[Effect]:
        return [Send(member, message) for member in offer.others(self.me)]

    def _announcement(self, offer: Offer) -> Announce:
        assert offer.epoch is not None
        return Announce(offer.epoch.id, offer.slot, offer.serial, self.floor, offer.header)

    def _announce(self, offer: Offer) -> list[Effect]:
        """Begin an attempt under the present epoch; under the next one, if this one is spent for the slot."""
        offer.epoch = offer.roll = offer.division = None
        offer.phase = Phase.HEADERS
        offer.confirms, offer.answers = {}, set()
        epoch = self.epoch
        if epoch is None or self.me not in epoch.members:
            return []
        if (offer.slot, epoch.id) in self.void:
            return [Renew()]
        offer.epoch, offer.waits = epoch, 0
        self.serial += 1
        offer.serial = self.serial
        announcement = self._announcement(offer)
        self.headers.setdefault((offer.slot, epoch.id), {})[self.me] = announcement
        return [*self._tell(offer, announcement), *self._count_headers(offer)]

    def _count_headers(self, offer: Offer) -> list[Effect]:
        if offer.epoch is None or offer.phase is not Phase.HEADERS:
            return []
        attempt = (offer.slot, offer.epoch.id)
        heard = self.headers[attempt]
        if any(member not in heard for member in offer.epoch.members):
            return []
        roll = call_roll({m.island: heard[m].header for m in offer.epoch.members})
        if self.me.island in roll.behind:
            return self._finish(Outcome(offer.slot, "behind", reason="others hold a longer history"))
        if not roll.contributors:
            finite = any(heard[m].header.finite for m in offer.epoch.members)
            return self._fail(
                offer,
                "no island has made a step since it last applied the fragment"
                if finite
                else "no delta is finite",
            )
        offer.roll = roll
        offer.phase = Phase.BULK
        offer.tries += 1
        return [first_bulk(offer, self.me.island, self.merge)]

    def _contributions(self, offer: Offer, payloads: Mapping[int, torch.Tensor]) -> list[Contribution]:
        assert offer.roll is not None and offer.epoch is not None
        headers = {m.island: a.header for m, a in self.headers[(offer.slot, offer.epoch.id)].items()}
        return [
            Contribution(i, headers[i].steps, headers[i].tokens, payloads[i], spare=i != self.me.island)
            for i in offer.roll.contributors
        ]

    def _settle(self, offer: Offer) -> list[Effect]:
        """Commit when every member of the roll has confirmed. The lowest island's digest is the reference."""
        assert offer.roll is not None
        if any(island not in offer.confirms for island in offer.roll.members):
            return []
        return self._commit(offer, offer.confirms[offer.roll.members[0]])

    def _commit(self, offer: Offer, value: str) -> list[Effect]:
        assert offer.roll is not None and offer.epoch is not None
        self.committed[offer.slot] = (offer.epoch.id, value)
        if value != offer.digest:
            reason = "our merged bits differ from the reference's"
            return self._finish(Outcome(offer.slot, "behind", reason=reason))
        heard = {m.island: a.header for m, a in self.headers[(offer.slot, offer.epoch.id)].items()}
        contributors = offer.roll.contributors
        return self._finish(
            Outcome(
                offer.slot,
                "committed",
                advance=offer.advance,
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

    def _fail(self, offer: Offer, reason: str) -> list[Effect]:
        self.failed.add(offer.slot)
        return self._finish(Outcome(offer.slot, "failed", reason=reason))

    def _finish(self, outcome: Outcome) -> list[Effect]:
        del self.offers[outcome.slot]
        if outcome.status == "behind":
            self.behind.add(outcome.slot)
        settled = outcome.status in ("committed", "failed")
        self.floor = self._oldest(max(self.floor, outcome.slot + 1) if settled else outcome.slot)
        oldest = self.floor - REMEMBERED
        self.committed = {s: v for s, v in self.committed.items() if s > oldest}
        self.failed = {s for s in self.failed if s > oldest}
        self.void = {a for a in self.void if a[0] > oldest}
        self.headers = {a: h for a, h in self.headers.items() if a[0] >= self.floor and a[0] != outcome.slot}
        present = self.epoch.islands() if self.epoch is not None else (self.me.island,)
        return [Finished(replace(outcome, present=present))]

    def _void(self, offer: Offer, reason: str) -> list[Effect]:
        """The present attempt will never commit: try again under another epoch, or give the slot up."""
        assert offer.epoch is not None
        attempt = (offer.slot, offer.epoch.id)
        self.void.add(attempt)
        gone: list[Effect] = [Abandon(attempt)] if offer.phase is Phase.BULK else []
        if offer.tries >= MAX_TRIES:
            return [*gone, *self._fail(offer, f"{reason} ({offer.tries} tries)")]
        return [*gone, *self._announce(offer)]

    def _leave(self, offer: Offer, why: str) -> list[Effect]:
        """Never to confirm the present attempt, and the others need not wait for it."""
        if offer.epoch is None:
            return []
        attempt = (offer.slot, offer.epoch.id)
        self.void.add(attempt)
        if offer.phase is not Phase.BULK:
            return []
        return [Abandon(attempt), *self._tell(offer, Confirm(attempt[1], attempt[0], None, why))]

    def _restart(self, offer: Offer) -> list[Effect]:
        """Leave an unconfirmed attempt for the new epoch."""
        gone: list[Effect] = []
        if offer.epoch is not None:
            attempt = (offer.slot, offer.epoch.id)
            self.void.add(attempt)
            gone = [Abandon(attempt)] if offer.phase is Phase.BULK else []
        return [*gone, *self._announce(offer)]

    # ---- unknown outcome -------------------------------------------------------------------------------------------

    def _survivors(self, offer: Offer) -> list[Member]:
        assert self.epoch is not None
        return [m for m in offer.others(self.me) if m in self.epoch.members]

    def _coordinates(self, offer: Offer) -> bool:
        return all(self.me < member for member in self._survivors(offer))

    def _resolve(self, offer: Offer) -> list[Effect]:
        """Confirmed, but a member is lost: find out, or as lowest survivor decide, whether the attempt was committed."""
        assert offer.epoch is not None
        offer.phase = Phase.RESOLVE
        ask = Ask(offer.epoch.id, offer.slot)
        survivors = self._survivors(offer)
        if not self._coordinates(offer):
            return [Send(survivors[0], ask)]
        missing = [m for m in survivors if m.island not in offer.answers]
        if missing:
            return [Send(member, ask) for member in missing]
        return self._void(offer, "a member was lost before all had confirmed")
