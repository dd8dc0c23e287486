"""Islands that come and go: crash, freeze, leave, lose one another or everything, in every phase of the exchange."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tests.exhaustive.exchange.fault_schedules import explain, less_of
from tests.exhaustive.exchange.simulation import (
    FP32,
    LOSSY,
    USUAL_S,
    Actor,
    Simulation,
    founded,
)
from torchtitan_diloco.exchange.attempt import Bulk
from torchtitan_diloco.exchange.attempt import Phase as Open
from torchtitan_diloco.exchange.memory import DETECT_S, Boundary, Fate, MemoryNet, MemoryTransport
from torchtitan_diloco.exchange.messages import Epoch, Message
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import FragmentState, OuterState

KINDS = ("crash", "freeze", "leave", "partition", "cut", "join")
"""crash: its memory is gone. freeze: it stands still, its sockets open. leave: in good order, to come back with what it has
saved. partition: the islands fall into two sides, which both reach the Lighthouse. cut: it reaches nobody, not even that.
join: one more comes than there were."""
PHASES = ("training", "headers", "bulk", "confirm", "outcome", "healing")
RARE = ("outcome", "healing")
MOST_EVENTS = 20_000


class Weather(MemoryNet):
    """A network whose islands can stand still and whose links can be gone for a while."""

    def __init__(self, script: Callable[[Boundary], Fate]) -> None:
        super().__init__(self._weather)
        self._then = script
        self.frozen: set[Member] = set()
        self.cut: set[int] = set()
        self.side: dict[int, int] = {}  # islands that are on another side than the rest
        self._gone: set[Member] = set()  # silent for so long that the Lighthouse counts them no more
        self._held: dict[Member, list[Callable[[], None]]] = {}

    # ---- faults ----------------------------------------------------------------------------------------------------

    def freeze(self, node: MemoryTransport, seconds: float) -> None:
        self.frozen.add(node.me)
        self.at(DETECT_S, partial(self._silent, node.me))
        self.at(seconds, partial(self._thaw, node.me))

    def _thaw(self, member: Member) -> None:
        self.frozen.discard(member)
        self._heard(member)
        for action in self._held.pop(member, []):
            self.at(0.0, action)

    def cut_off(self, node: MemoryTransport, seconds: float) -> None:
        self.cut.add(node.me.island)
        self.at(DETECT_S, partial(self._silent, node.me))
        self.at(seconds, partial(self._mended, node.me))

    def _mended(self, member: Member) -> None:
        self.cut.discard(member.island)
        self._heard(member)

    def part(self, islands: set[int], seconds: float) -> None:
        self.side = dict.fromkeys(islands, 1)
        self.at(seconds, self.side.clear)

    def _silent(self, member: Member) -> None:
        """Its heartbeats are missed: the others give up what they do with it."""
        if member not in self.frozen and member.island not in self.cut:
            return
        self._gone.add(member)
        for meeting, arrived in list(self._bulks.items()):
            if any(member in bulk.members for bulk in arrived.values()):
                self._break(meeting, f"island {member.island} is silent")
        self.renew()

    def _heard(self, member: Member) -> None:
        self._gone.discard(member)
        node = self.nodes.get(member.island)
        if node is not None and node.me == member:
            node.perform(node.protocol.lost_touch("was away"))
        self.renew()

    # ---- what is left of the network -------------------------------------------------------------------------------

    def apart(self, a: int, b: int) -> bool:
        return a in self.cut or b in self.cut or self.side.get(a, 0) != self.side.get(b, 0)

    def present(self) -> tuple[Member, ...]:
        return tuple(member for member in super().present() if member not in self._gone)

    def within_reach(self, me: Member) -> list[MemoryTransport]:
        return [
            node
            for node in super().within_reach(me)
            if node.me not in self.frozen and not self.apart(me.island, node.me.island)
        ]

    def renew(self, by: Member | None = None, delay: float = 0.05) -> None:
        if by is None or by.island not in self.cut:
            super().renew(by, delay)

    def _weather(self, boundary: Boundary) -> Fate:
        if self.apart(boundary.sender, boundary.receiver):
            return Fate(delays=())
        return self._then(boundary)

    # ---- who stands still does everything later --------------------------------------------------------------------

    def step(self) -> bool:
        if not self._events:
            return False
        owner = _owner(self._events[0][2])
        if owner is not None and owner.me in self.frozen and self.nodes.get(owner.me.island) is owner:
            self.now, _, action = heapq.heappop(self._events)
            self._held.setdefault(owner.me, []).append(action)
            return True
        return super().step()

    def _later(self, member: Member, action: Callable[[], None]) -> bool:
        if member not in self.frozen:
            return False
        self._held.setdefault(member, []).append(action)
        return True

    def _enter(self, member: Member, epoch: Epoch) -> None:
        if member.island not in self.cut and not self._later(member, partial(self._enter, member, epoch)):
            super()._enter(member, epoch)

    def _deliver(self, sender: Member, to: Member, message: Message) -> None:
        if self.apart(sender.island, to.island):
            return
        if not self._later(to, partial(self._deliver, sender, to, message)):
            super()._deliver(sender, to, message)

    def _end_bulk(self, to: Member, bulk: Bulk, parts: dict[int, torch.Tensor] | None) -> None:
        if not self._later(to, partial(self._end_bulk, to, bulk, parts)):
            super()._end_bulk(to, bulk, parts)


def _owner(action: Callable[[], None]) -> MemoryTransport | None:
    """Whose action it is, where it is an island's."""
    function: Any = action.func if isinstance(action, partial) else action
    what = getattr(function, "__self__", None)
    if isinstance(what, Actor):
        return what.transport
    return what if isinstance(what, MemoryTransport) else None


@dataclass(frozen=True)
class Event:
    """kind befalls an island that is in this phase, the ``nth`` time one is seen in it after ``after`` seconds.

    seconds: until it is over, or the island is back.
    """

    kind: str
    phase: str
    after: float
    nth: int
    seconds: float


@dataclass(frozen=True)
class Comings:
    """seed: of all times and of the islands' own pace. islands: at the beginning."""

    islands: int
    slots: int
    fragments: int = 1
    overlap: int = 0
    events: tuple[Event, ...] = ()
    seed: int = 0
    lossy: bool = False

    def run(self, note: Callable[[str], None] = lambda line: None) -> "Traffic":
        """Raises AssertionError where a promise is broken, and whatever else is raised."""
        simulation = Traffic(self, note)
        simulation.run(MOST_EVENTS)
        simulation.check_progress()
        return simulation

    def smaller(self) -> "Iterator[Comings]":
        """With one thing less, the most wanted first."""
        for i in range(len(self.events)):
            yield replace(self, events=self.events[:i] + self.events[i + 1 :])
        yield from less_of(self, 1)
        if self.lossy:
            yield replace(self, lossy=False)


class Traffic(Simulation):
    """A simulation in which the events of ``Comings`` happen. hits: what befell an island in which phase."""

    heal_s = 0.3

    def __init__(self, comings: Comings, note: Callable[[str], None]) -> None:
        rng = random.Random(comings.seed)
        self.note, self.rng = note, rng
        self.pending = list(comings.events)
        self.seen = [0] * len(self.pending)
        self.hits: Counter[tuple[str, str]] = Counter()
        self.saved: dict[int, OuterState] = {}
        self.own: set[tuple[int, int, str]] = set()
        """(incarnation, fragment, lineage) of what an island had committed when it fell silent, or with what it had heard
        by then: where its confirmation was lost with a link, the others have done without it. What it commits once it is back
        has to be theirs again."""
        self.split = False
        """Whether one was cut off, or frozen with more than the others: of what either does then, the history with more
        tokens goes on."""
        self.unapplied: set[tuple[int, int]] = set()
        """(incarnation, slot) of what of that it had not applied yet."""
        self.leaving: dict[int, float] = {}  # who leaves -> seconds until it comes back

        def script(boundary: Boundary) -> Fate:
            return Fate(delays=(rng.uniform(0.001, 0.8 * USUAL_S),))

        codec = LOSSY if comings.lossy else FP32
        super().__init__(
            comings.islands, comings.slots, comings.seed, script, comings.fragments, comings.overlap, 2, codec
        )

    def network(self) -> Weather:
        return Weather(self.fate)

    @property
    def weather(self) -> Weather:
        assert isinstance(self.net, Weather)
        return self.net

    # ---- what befalls whom -----------------------------------------------------------------------------------------

    def check(self) -> None:
        awake = [actor.state.slot for actor in self.living()]
        for node in self.net.nodes.values():
            if node.me in self.weather.frozen and node.state and awake and node.state.slot > max(awake):
                self.split = True  # those who could go on from what it holds are gone
        super().check()
        for actor in self.living():
            settled = not actor.transport.protocol.offers and not actor.healing
            if actor.island in self.leaving and settled:
                self.left(actor)
        for i, event in enumerate(self.pending):
            if self.net.now < event.after:
                continue
            victim = next((a for a in self.living() if self.phase(a) == event.phase), None)
            if victim is None:
                continue
            self.seen[i] += 1
            if self.seen[i] >= event.nth:
                del self.pending[i], self.seen[i]
                self.befall(victim, event)
            return

    def living(self) -> list[Actor]:
        return [
            actor
            for island, actor in sorted(self.actors.items())
            if actor.alive() and actor.transport.me not in self.weather.frozen
        ]

    def phase(self, actor: Actor) -> str:
        if actor.healing:
            return "healing"
        open_phases = {offer.phase for offer in actor.transport.protocol.offers.values()}
        for phase in (Open.RESOLVE, Open.CONFIRM, Open.BULK, Open.HEADERS):
            if phase in open_phases:
                return phase.value
        return "training"

    def befall(self, victim: Actor, event: Event) -> None:
        weather, island = self.weather, victim.island
        if event.kind in ("freeze", "cut", "partition") and (weather.frozen or weather.cut or weather.side):
            return  # one such at a time: a run is to go on after it
        if event.kind in ("freeze", "cut") and any(actor.done() for actor in self.actors.values()):
            return  # there would be no slot in which it learns what the others have done
        epoch = victim.transport.protocol.epoch
        if event.kind == "cut" and (epoch is None or len(epoch.members) == 1):
            return  # alone already, it would go on by itself, and so would others: two histories, see test_forks
        if event.kind == "crash" and not weather.within_reach(victim.transport.me):
            return  # the run's state would be gone with it
        self.hits[event.kind, event.phase] += 1
        self.note(
            f"at {self.net.now:.2f} s: {event.kind} of island {island} in {event.phase}, {event.seconds:.1f} s"
        )
        self.disturbed(event.seconds + DETECT_S)
        self.quiet = max(self.quiet, self.net.now + event.seconds + DETECT_S)
        if event.kind in ("freeze", "cut"):
            for fragment, state in enumerate(victim.state.states):
                self.set_apart(victim, fragment, state)
            self.unapplied |= {(victim.incarnation, slot) for slot in victim.transport.outcomes}
        if event.kind == "crash":
            self.net.crash(island)
        elif event.kind == "freeze":
            weather.freeze(victim.transport, event.seconds)
        elif event.kind == "cut":
            self.split = True
            weather.cut_off(victim.transport, event.seconds)
        elif event.kind == "partition":
            others = [i for i in sorted(self.net.nodes) if i != island]
            weather.part({island, *self.rng.sample(others, len(others) // 2)}, event.seconds)
        elif event.kind == "leave":
            self.leaving[island] = event.seconds
            victim.transport.perform(victim.transport.protocol.withdraw())
        else:
            newcomer = max(self.actors) + 1
            self.start(newcomer)

    def left(self, actor: Actor) -> None:
        """All that was open is settled: it saves, and is gone until it comes back."""
        for _ in range(len(actor.transport.outcomes)):
            actor.poll()
        actor.sent.clear()
        seconds = self.leaving.pop(actor.island)
        saved = founded(self.fragments)
        tensors = {name: tensor.clone() for name, tensor in actor.state.tensors().items()}
        saved.restore(actor.state.describe(), tensors)
        others = [node.state.slot for node in self.weather.within_reach(actor.transport.me) if node.state]
        if not others or max(others) >= actor.state.slot:
            self.saved[actor.island] = saved
        # Else one that has joined has not caught up yet: what it lacks is gone with this island, which returns with nothing.
        actor.transport.leave("drain")
        self.net.at(seconds, partial(self.start, actor.island))

    def start(self, island: int) -> None:
        if island in self.net.nodes:
            return
        if self.net.nodes and not self.weather.within_reach(Member(island, "")):
            self.net.at(1.0, partial(self.start, island))  # it waits for those that hold the run's state
            return
        super().start(island)

    def outside(self, actor: Actor, fragment: int) -> bool:
        if self.split:
            return True
        return (actor.incarnation, fragment, actor.state.states[fragment].lineage) in self.own

    def set_apart(self, actor: Actor, fragment: int, state: FragmentState) -> None:
        """Should the others do without it, the history with more tokens goes on, be it this or theirs."""
        self.own.add((actor.incarnation, fragment, state.lineage))
        self.healed(actor, fragment)

    def healed(self, actor: Actor, fragment: int) -> None:
        """What it held before is nobody's by it any more: perhaps several versions, where it had just joined."""
        for (of, _), digests in self.account.holders.items():
            if of == fragment:
                for holders in digests.values():
                    holders.discard(actor.incarnation)

    def applied(self, actor: Actor, slot: int, fragment: int) -> None:
        if (actor.incarnation, slot) in self.unapplied or actor.island in self.weather.cut:
            self.set_apart(actor, fragment, actor.state.states[fragment])

    def check_progress(self) -> None:
        super().check_progress()
        self.own.clear()
        if self.split:  # whatever there was, in the end there is one history
            self.split = False
            self.account.holders.clear()
        self.check()

    def leaves(self, island: int) -> bool:
        return island in self.leaving

    def beginning(self, island: int) -> OuterState:
        return self.saved.pop(island, None) or founded(self.fragments)


def drawn(seed: int) -> Comings:
    """1 to 5 islands, 1 to 4 fragments, 0 to 3 slots of overlap, 1 to 5 events."""
    rng = random.Random(seed)
    islands, fragments = rng.randint(1, 5), rng.randint(1, 4)
    events = []
    for _ in range(rng.randint(1, 5)):
        kind, phase, after = rng.choice(KINDS), rng.choice(PHASES), rng.uniform(0.0, 8.0)
        nth = rng.randint(1, 3 if phase in RARE else 12)
        events.append(Event(kind, phase, after, nth, rng.uniform(0.5, 8.0)))
    return Comings(
        islands, 8, fragments, rng.randrange(fragments), tuple(events), seed, lossy=rng.random() < 0.3
    )


def run_drawn(seed: int) -> Counter[str]:
    """Raises AssertionError that explains the schedule of that seed, if it fails. Counts what it went through."""
    comings = drawn(seed)
    try:
        simulation = comings.run()
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error}\n{explain(comings, Comings.smaller)}"
        ) from error
    hits = Counter({f"{kind} in {phase}": n for (kind, phase), n in simulation.hits.items()})
    return Counter(schedules=1, slots=len(simulation.commits)) + hits
