"""N islands in one process on a virtual clock: the deterministic harness of protocol, algorithm and quality tests.

The protocol code is the production one; only its messages travel through a heap of events instead of sockets. Delays and
faults are scripted per message (a *boundary*), so that every point at which something can go wrong can be hit.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.attempt import Abandon, Bulk, Effect, Finished, Renew, Send, Stage
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.messages import Epoch, Message, Outcome
from torchtitan_diloco.exchange.protocol import SlotProtocol
from torchtitan_diloco.exchange.traffic import Traffic
from torchtitan_diloco.exchange.transport import Heal, Hello, Joined, Transport, Waiting, register_transport
from torchtitan_diloco.outer.founding import awaited, may_found
from torchtitan_diloco.outer.history import has_more
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState, OuterStep, combine

TICK_S = 1.0
DETECT_S = 2.0  # from a crash to the others' new membership
BULK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Boundary:
    """One message about to travel: its number in the run, what it is, from whom to whom, about which slot.

    stage: of a bulk.
    """

    number: int
    kind: Literal["message", "bulk"]
    sender: int
    receiver: int
    message: Message | None
    slot: int
    stage: Stage | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens at a boundary: deliveries (delays in seconds; none = dropped) and crashes of either side."""

    delays: tuple[float, ...] = (0.01,)
    crash: tuple[int, ...] = ()
    crash_first: bool = False


Script = Callable[[Boundary], Fate]
Meeting = tuple[tuple[int, str], Stage]
"""Attempt and stage of a bulk."""


class MemoryNet:
    """The network, the clock and the membership of one simulated run."""

    def __init__(self, script: Script | None = None, patience_s: float | None = None) -> None:
        """patience_s: how long islands wait for founders, each in a thread of its own; None: who comes first founds it."""
        self.now = 0.0
        self.patience_s, self.overdue = patience_s, False
        self.founders: dict[int, MemoryTransport] = {}
        self.door = threading.Condition()  # one comes in at a time
        self.script = script or (lambda boundary: Fate())
        self.nodes: dict[int, MemoryTransport] = {}
        self.boundaries = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._epochs = itertools.count()
        self._bulks: dict[Meeting, dict[Member, Bulk]] = {}
        self.on_crash: Callable[[int], None] = lambda island: None

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), action))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def run(self, seconds: float) -> None:
        """Let everything happen that is due within ``seconds``."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.step()
        self.now = max(self.now, end)

    # ---- membership ------------------------------------------------------------------------------------------------

    def renew(self, by: Member | None = None, delay: float = 0.05) -> None:
        """Everybody present learns of a new epoch, one after the other. by: who has asked for it."""
        members = self.present()
        epoch = Epoch(f"epoch-{next(self._epochs)}", members)
        for i, member in enumerate(members):
            self.at(delay * (1 + i), partial(self._enter, member, epoch))

    def present(self) -> tuple[Member, ...]:
        """Whom the next epoch holds."""
        return tuple(self.nodes[island].me for island in sorted(self.nodes))

    def within_reach(self, me: Member) -> "list[MemoryTransport]":
        """Of whom ``me`` can take state."""
        return [node for node in self.nodes.values() if node.me != me]

    def _enter(self, member: Member, epoch: Epoch) -> None:
        node = self.nodes.get(member.island)
        if node is not None and node.me == member:
            node.perform(node.protocol.enter(epoch))

    def crash(self, island: int) -> None:
        node = self.nodes.pop(island, None)
        if node is None:
            return
        for meeting, arrived in list(self._bulks.items()):
            if node.me in arrived:
                self._break(meeting, f"connection to island {island} reset")
        self.on_crash(island)
        self.at(DETECT_S, self.renew)

    # ---- traffic ---------------------------------------------------------------------------------------------------

    def send(self, sender: Member, send: Send) -> None:
        boundary = Boundary(
            next(self.boundaries), "message", sender.island, send.to.island, send.message, send.message.slot
        )
        fate = self.script(boundary)
        if fate.crash_first:
            self._crash(fate)
            return
        for delay in fate.delays:
            self.at(delay, lambda: self._deliver(sender, send.to, send.message))
        self._crash(fate)

    def _crash(self, fate: Fate) -> None:
        for island in fate.crash:
            self.crash(island)

    def _deliver(self, sender: Member, to: Member, message: Message) -> None:
        node = self.nodes.get(to.island)
        if node is not None and node.me == to:
            node.perform(node.protocol.receive(sender, message))

    def bulk(self, me: Member, bulk: Bulk) -> None:
        """A member has reached a stage of the bulk; when all have, each gets its parts, unless the script loses some."""
        meeting = (bulk.attempt, bulk.stage)
        arrived = self._bulks.setdefault(meeting, {})
        arrived[me] = bulk
        if set(arrived) != set(bulk.members):
            self.at(BULK_TIMEOUT_S, lambda: self._give_up(me, bulk))
            return
        del self._bulks[meeting]
        for i, receiver in enumerate(bulk.members):
            parts = {member.island: b.sends[i].clone() for member, b in arrived.items()}
            fates = [
                self.script(
                    Boundary(
                        next(self.boundaries), "bulk", sender.island, receiver.island, None, bulk.attempt[0],
                        bulk.stage,
                    )
                )
                for sender in bulk.members
                if sender != receiver
            ]  # fmt: skip
            lost = any(fate.crash_first or not fate.delays for fate in fates)
            delay = max((max(fate.delays, default=BULK_TIMEOUT_S) for fate in fates), default=0.0)
            self.at(delay, partial(self._end_bulk, receiver, arrived[receiver], None if lost else parts))
            for fate in fates:
                self._crash(fate)

    def _end_bulk(self, to: Member, bulk: Bulk, parts: dict[int, torch.Tensor] | None) -> None:
        node = self.nodes.get(to.island)
        if node is not None and node.me == to:
            node.end_bulk(bulk, parts, "lost")

    def _give_up(self, me: Member, bulk: Bulk) -> None:
        meeting = (bulk.attempt, bulk.stage)
        if self._bulks.get(meeting, {}).get(me) is bulk:
            self._break(meeting, "timed out")

    def _break(self, meeting: Meeting, reason: str) -> None:
        for member, bulk in self._bulks.pop(meeting, {}).items():
            node = self.nodes.get(member.island)
            if node is not None and node.me == member:
                self.at(0.0, partial(node.end_bulk, bulk, None, reason))

    def abandon(self, me: Member, attempt: tuple[int, str]) -> None:
        for (of, _), arrived in self._bulks.items():
            if of == attempt:
                arrived.pop(me, None)


@dataclass(slots=True, eq=False)
class MemoryTransport(Transport):
    """One island's side. ``join`` and ``heal`` happen at once; ``result`` lets virtual time pass."""

    merge: Merge
    net: MemoryNet = field(default_factory=MemoryNet)
    me: Member = field(default_factory=lambda: Member(0, ""))
    state: OuterState | None = None
    step: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    offered: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    ticking: bool = False
    awaited: Waiting | None = None
    protocol: SlotProtocol = field(init=False)

    def join(self, hello: Hello, state: OuterState) -> Joined:
        self.me = Member(hello.island, hello.incarnation)
        self.protocol = SlotProtocol(self.me, self.merge)
        self.state, self.step = state, hello.step
        with self.net.door:
            if self.net.patience_s is not None and not hello.finished:
                self._await_founders(hello, self.net.patience_s)
            return self._come_in(hello, state)

    def _await_founders(self, hello: Hello, patience_s: float) -> None:
        """Until the run is there, or this island is to found it. Raises Resumable."""
        net, rule, islands = self.net, hello.found, hello.num_islands
        what = awaited(rule, islands, patience_s)
        since, net.founders[hello.island] = net.now, self
        try:
            while not net.nodes:
                here = net.founders
                self.awaited = Waiting(what, since, f"islands present: {', '.join(map(str, sorted(here)))}")
                if may_found(rule, islands, len(here), net.overdue):
                    if self is max(here.values(), key=lambda n: (*n.rank(), -n.me.island)):
                        return
                elif net.now - since > patience_s:
                    if not may_found(rule, islands, len(here), True):
                        why = f"for {what}; {self.awaited.why}"
                        raise Resumable(f"waited {patience_s:g} s (lighthouse.patience_s) {why}")
                    net.overdue = True
                net.run(TICK_S)
                net.door.wait(0.001)
        finally:
            self.awaited = None
            del net.founders[hello.island]

    def rank(self) -> tuple[int, int]:
        """Of two histories, the one that ranks higher is the run's."""
        assert self.state is not None
        return self.state.tokens_total, self.state.slot

    def _come_in(self, hello: Hello, state: OuterState) -> Joined:
        behind = self._others() and not hello.finished
        joined = self._take(state, whole=True) if behind else Joined(hello.step, present=(hello.island,))
        self.protocol.skip_to(state.slot)
        self.net.nodes[hello.island] = self
        self.net.renew()
        return joined

    def _others(self) -> list["MemoryTransport"]:
        return self.net.within_reach(self.me)

    def heal(self, state: OuterState) -> Joined:
        return self._take(state, whole=False)

    def _take(self, state: OuterState, whole: bool) -> Joined:
        if not self._others():
            raise Resumable("no other island holds the run's state any more")
        source = max(self._others(), key=lambda n: (*n.rank(), -n.me.island))
        assert source.state is not None
        mine, tensors = state.describe(), state.tensors()
        theirs = source.state.describe()
        description = theirs if whole and not has_more(mine, theirs) else combine(mine, theirs)
        for i, (wanted, held) in enumerate(zip(description["fragments"], mine["fragments"], strict=True)):
            if wanted != held:
                suffix = f".{i}"
                tensors = {name: t for name, t in tensors.items() if not name.endswith(suffix)}
                tensors |= {n: t.clone() for n, t in source.state.tensors().items() if n.endswith(suffix)}
        same = description["fragments"] == mine["fragments"]
        state.restore(description, tensors)
        taken = Heal(source.me.island, sum(t.nbytes for t in tensors.values()), 0.0, state.states[0].version)
        present = {self.me.island, *self.net.nodes}
        return Joined(source.step, () if same else (taken,), tuple(sorted(present)))

    def publish(self, state: OuterState) -> None:
        self.state = state
        self.perform(self.protocol.skip_to(state.slot))

    def progress(self, step: int) -> None:
        self.step = step

    def offer(self, header: Header, payload: torch.Tensor, outer_step: OuterStep) -> None:
        self.offered = self.net.now
        self.traffic.open(header.slot)
        self.perform(self.protocol.offer(header, payload, outer_step))
        if not self.ticking:
            self.ticking = True
            self.net.at(TICK_S, self._tick)

    def _tick(self) -> None:
        if self.net.nodes.get(self.me.island) is self and self.protocol.offers:
            self.perform(self.protocol.tick())
            self.net.at(TICK_S, self._tick)
        else:
            self.ticking = False

    def result(self, slot: int, timeout_s: float) -> Outcome | None:
        if slot not in self.outcomes and timeout_s > 0:
            self.net.run(timeout_s)
        return self.outcomes.pop(slot, None)

    def withdraw(self) -> None:
        self.perform(self.protocol.withdraw())

    def waiting(self) -> Waiting | None:
        waited = self.protocol.waiting_for() if self.awaited is None else None
        if waited is None:
            return self.awaited
        offer, islands = waited
        why = f"{offer.phase.value} of slot {offer.slot}"
        target = tuple(islands) or "membership"
        return Waiting(target, self.offered, why, offer.slot).more(self.traffic.progress(offer.slot))

    def stop(self) -> None:
        pass

    def leave(self, reason: str) -> None:
        if self.net.nodes.pop(self.me.island, None) is not None:
            self.net.renew()

    def end_bulk(self, bulk: Bulk, parts: dict[int, torch.Tensor] | None, reason: str) -> None:
        if parts is None:
            self.perform(self.protocol.bulk_failed(bulk.attempt, reason))
            return
        sent, received = bulk.traffic(self.me)
        self.traffic.add(bulk.attempt[0], sent=sent, received=received)
        self.perform(self.protocol.bulk_done(bulk.attempt, parts))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self.net.nodes.get(self.me.island) is not self:
                return  # crashed in the middle
            if isinstance(effect, Send):
                self.net.send(self.me, effect)
            elif isinstance(effect, Bulk):
                self.traffic.expect(effect.attempt[0], sum(effect.traffic(self.me)))
                self.net.bulk(self.me, effect)
            elif isinstance(effect, Abandon):
                self.net.abandon(self.me, effect.attempt)
            elif isinstance(effect, Renew):
                self.net.renew(self.me)
            elif isinstance(effect, Finished):
                sent, received = self.traffic.close(effect.outcome.slot)
                self.outcomes[effect.outcome.slot] = replace(
                    effect.outcome, bytes_sent=sent, bytes_received=received
                )


@register_transport("memory")
def alone(
    island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
) -> Transport:
    """As ``[transport] kind``: a network of one island, which takes the outer step on its own delta."""
    return MemoryTransport(merge)
