"""Islands that do nothing but offer slots over the in-memory network, and the invariants that must hold whatever happens."""

import math
import random
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.exhaustive.exchange.account import Account, Work
from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.memory import (
    BULK_TIMEOUT_S,
    DETECT_S,
    TICK_S,
    Boundary,
    Fate,
    MemoryNet,
    MemoryTransport,
    Script,
)
from torchtitan_diloco.exchange.transport import Hello
from torchtitan_diloco.outer.fragments import Fragment, Piece, TensorSpec
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import Advance, OuterState
from torchtitan_diloco.outer.values import Flat
from torchtitan_diloco.semi_sync.wire import Wire

WINDOW_S = 1.0
LONGEST_WINDOW_S = 1.5
USUAL_S = 0.1  # a message that takes longer is late
SLOTS_A_SECOND = 3  # at most, while nothing goes wrong
SIZE = 22  # values of a fragment; in blocks of 4 they make slices of one or two blocks
FP32 = CodecConfig()
LOSSY = CodecConfig(wire="int8", block=4, error_feedback=True)
LOST = 0.05  # of the largest value, by what two encodings and two residuals can differ from what was offered


def fragments_of(count: int) -> tuple[Fragment, ...]:
    """``count`` fragments of ``SIZE`` values each."""
    spec = TensorSpec("w", (SIZE,), torch.float32)
    return tuple(Fragment(i, (Piece(spec, 0, 0, SIZE),)) for i in range(count))


def founded(fragments: int) -> OuterState:
    """What every island of a simulation begins with."""
    anchors = [torch.zeros(SIZE) for _ in range(fragments)]
    return OuterState.found(fragments_of(fragments), OuterSGD(0.7, 0.9, True), anchors)


@dataclass
class Actor:
    """One incarnation of an island: trains a slot's worth of steps, sends, and applies ``overlap`` slots later."""

    sim: "Simulation"
    island: int
    incarnation: int
    transport: MemoryTransport
    state: OuterState
    wire: Wire
    trained: int = 0  # inner steps in all
    steps: dict[int, int] = field(default_factory=dict)  # of them, by fragment, since it was applied
    sent: dict[int, int] = field(
        default_factory=dict
    )  # slot not applied yet -> version its delta is based on
    next_slot: int = 0
    merged: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot
    log: list[tuple[int, str]] = field(default_factory=list)
    healing: bool = False  # training stands still meanwhile

    def alive(self) -> bool:
        return self.sim.net.nodes.get(self.island) is self.transport

    def done(self) -> bool:
        """Has sent its last slot."""
        return self.alive() and self.next_slot >= self.sim.slots

    def window(self) -> None:
        """Inner steps are done: apply what is due (waiting for it if need be), then send the next slot's fragment."""
        if not self.alive() or self.healing or self.sim.leaves(self.island):
            return
        due = self.sent and (len(self.sent) > self.sim.overlap or self.next_slot >= self.sim.slots)
        if due:
            return  # poll() comes back here
        if self.next_slot >= self.sim.slots:
            return
        fragment = self.next_slot % self.sim.fragments
        self.trained += 4
        for f in range(self.sim.fragments):
            self.steps[f] = self.steps.get(f, 0) + 4
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        self.sent[slot] = self.state.states[fragment].version
        self.send(slot, self.steps[fragment])
        self.sim.net.at(WINDOW_S * self.sim.random.uniform(0.5, LONGEST_WINDOW_S), self.window)

    def send(self, slot: int, steps: int) -> None:
        fragment = slot % self.sim.fragments
        state = self.state.states[fragment]
        who = (self.island, self.incarnation, slot)
        delta = state.anchor - torch.tensor([float(hash((*who, i)) % 97) for i in range(SIZE)])
        work = Work(
            self.island, self.incarnation, slot, self.trained - steps, self.trained, steps * 10, delta.clone()
        )
        position = self.sim.account.offer(work)
        header = Header(
            self.island, slot, fragment, state.version, state.digest, state.lineage, state.tokens,
            steps, steps * 10, True, {f"a/{self.island}": position}, {}, {"a": "0-4"}, False,
        )  # fmt: skip
        self.sim.offered(slot)
        take = self.state.outer_step(fragment, slot)

        def outer_step(merged: Merged) -> Advance:
            self.merged[slot] = merged.whole().clone()
            return take(Merged.of(merged.delta))

        self.transport.offer(header, self.wire.encode(fragment, slot, Flat(delta)), outer_step)

    def poll(self) -> None:
        if not self.sent or not self.alive() or self.healing:
            return
        leaves = self.sim.leaves(self.island)
        waits = leaves or len(self.sent) > self.sim.overlap or self.next_slot >= self.sim.slots
        if not waits:
            return
        outcome = self.transport.result(next(iter(self.sent)), 0)
        if outcome is None:
            return
        base = self.sent.pop(outcome.slot)
        self.log.append((outcome.slot, outcome.status))
        fragment = outcome.slot % self.sim.fragments
        taken = self.state.states[fragment].version != base  # from another island meanwhile
        counted = outcome.status == "committed" and not taken
        self.wire.settle(fragment, outcome.slot, counted, counted and self.island in outcome.participants)
        if counted:
            assert outcome.advance is not None
            parent = self.state.states[fragment].lineage
            committed = self.state.commit(
                outcome.slot,
                fragment,
                outcome.advance,
                list(outcome.participants),
                outcome.tokens,
                outcome.advanced,
                outcome.members,
            )
            self.sim.account.commit(parent, committed.lineage, outcome, self.merged.pop(outcome.slot))
            self.sim.commits.setdefault(outcome.slot, self.sim.net.now)
            self.steps[fragment] = 0
            self.sim.applied(self, outcome.slot, fragment)
        elif outcome.status == "failed" and not taken:
            self.state.fail(outcome.slot)
        elif leaves:
            return  # it takes what it has missed when it is back
        else:
            self.healing = True
            if self.sim.heal_s:
                self.sim.net.at(self.sim.heal_s, partial(self.heal, outcome.slot))
            else:
                self.heal(outcome.slot)
            return
        self.go_on()

    def go_on(self) -> None:
        self.transport.publish(self.state)
        self.sim.net.at(WINDOW_S * self.sim.random.uniform(0.1, 0.5), self.window)

    def heal(self, slot: int) -> None:
        """Take the state of another island; wait for one if the schedule has just killed the rest."""
        if not self.alive():
            return
        self.healing = True
        before = [s.lineage for s in self.state.states]
        try:
            self.transport.heal(self.state)
        except Resumable:
            self.sim.net.at(WINDOW_S, partial(self.heal, slot))
            return
        for fragment, held in enumerate(self.state.states):
            if held.lineage != before[fragment]:
                self.wire.reset(fragment)
                self.sim.healed(self, fragment)
        self.steps = {}
        for dropped in [s for s in self.sent if s < self.state.slot]:
            del self.sent[dropped]
            self.wire.settle(dropped % self.sim.fragments, dropped, committed=False, counted=False)
        self.next_slot = max(self.next_slot, self.state.slot)
        if (
            self.state.slot <= slot
        ):  # the source does not have it either, or not yet: it is sent again, before the others
            fragment = slot % self.sim.fragments
            self.sent = {slot: self.state.states[fragment].version, **self.sent}
            self.sim.net.at(WINDOW_S, partial(self.offer_again, slot))
        else:
            self.healing = False
            self.go_on()

    def offer_again(self, slot: int) -> None:
        if self.alive():
            self.healing = False
            self.send(slot, 0)
            self.go_on()


class Simulation:
    """A run of ``islands`` islands for ``slots`` slots under a fault script; ``more`` windows at least after its faults.

    A window is as many slots as there are fragments.
    """

    heal_s = 0.0
    """How long it takes to have the state of another island."""

    def __init__(
        self,
        islands: int,
        slots: int,
        seed: int,
        script: Script | None = None,
        fragments: int = 1,
        overlap: int = 0,
        more: int = 0,
        codec: CodecConfig = FP32,
    ) -> None:
        self.islands, self.codec = islands, codec
        self.random = random.Random(seed)
        self.slots, self.fragments, self.overlap, self.more = slots, fragments, overlap, more
        self.script = script or (lambda boundary: Fate())
        self.net = self.network()
        self.account = Account(lost=0.0 if codec == FP32 else LOST)
        self.calm = 0.0  # when the last fault was over
        self.quiet = 0.0  # and whoever had crashed was back, and missed before
        self.offers: dict[int, float] = {}  # slot -> when it was first offered
        self.commits: dict[int, float] = {}  # slot -> when it was first committed
        self.actors: dict[int, Actor] = {}
        self.incarnations = 0
        for island in range(islands):
            self.start(island)
        self.net.on_crash = self.crashed

    def network(self) -> MemoryNet:
        return MemoryNet(self.fate)

    def beginning(self, island: int) -> OuterState:
        """What the island comes with."""
        return founded(self.fragments)

    def leaves(self, island: int) -> bool:
        """Whether it is about to leave in good order: it begins nothing any more."""
        return False

    def healed(self, actor: Actor, fragment: int) -> None:
        """An island holds another's history of the fragment from now on."""

    def applied(self, actor: Actor, slot: int, fragment: int) -> None:
        """An island has committed a slot and taken its outer step."""

    def outside(self, actor: Actor, fragment: int) -> bool:
        """Whether what it holds of the fragment may be a history of its own."""
        return False

    def fate(self, boundary: Boundary) -> Fate:
        fate = self.script(boundary)
        if fate.crash or len(fate.delays) != 1 or fate.delays[0] > USUAL_S:
            self.disturbed(max(fate.delays, default=0.0))
        return fate

    def disturbed(self, seconds: float) -> None:
        """A fault has an effect as late as that. Unless an island is done, the run becomes long enough to go on after it."""
        self.calm = max(self.calm, self.net.now + seconds)
        if self.more and not any(actor.done() for actor in self.actors.values()):
            slot = max(self.offers, default=-1) + 1
            self.slots = max(
                self.slots, slot + math.ceil(SLOTS_A_SECOND * seconds) + self.more * self.fragments
            )

    def offered(self, slot: int) -> None:
        self.offers.setdefault(slot, self.net.now)

    def start(self, island: int) -> None:
        if island in self.net.nodes:
            return
        self.incarnations += 1
        self.quiet = max(self.quiet, self.net.now)
        state = self.beginning(island)
        wire = Wire(self.codec, MergeConfig(), state.fragments, "run", island, self.islands)
        transport = MemoryTransport(merge=wire.merge, net=self.net)
        hello = Hello(island, f"{self.incarnations:05d}", 0.0, "run", 0, {}, 0)
        transport.join(hello, state)
        self.actors[island] = Actor(
            self, island, self.incarnations, transport, state, wire, next_slot=state.slot
        )
        self.net.at(self.random.uniform(0.5, LONGEST_WINDOW_S), self.actors[island].window)

    def crashed(self, island: int) -> None:
        """A crashed island comes back, as long as another holds the run's state."""

        def again() -> None:
            if self.net.nodes:
                self.start(island)

        self.quiet = max(self.quiet, self.net.now + DETECT_S)
        self.net.at(self.random.uniform(1.0, 6.0), again)

    def run(self, limit: int = 200_000) -> None:
        for _ in range(limit):
            if not self.net.step():
                return
            for actor in self.actors.values():
                actor.poll()
            self.check()
        raise AssertionError("the run does not come to an end")

    def check(self) -> None:
        """No two living islands have ever held different bits for one version of a fragment, or residuals of one slice."""
        living = [a for i, a in self.actors.items() if self.net.nodes.get(i) is a.transport]
        for f in range(self.fragments):
            within = [actor for actor in living if not self.outside(actor, f)]
            incarnations = {actor.incarnation for actor in within}
            for actor in within:
                state = actor.state.states[f]
                self.account.hold(f, state.version, state.digest, actor.incarnation, incarnations)
        owned: dict[tuple[int, str], int] = {}
        for actor in living:
            for name in actor.wire.merge.residuals():
                f = int(name.removeprefix("residual.").partition("[")[0])
                owner = owned.setdefault((actor.state.states[f].version, name), actor.island)
                assert owner == actor.island, f"islands {owner} and {actor.island} both have {name}"

    def check_progress(self) -> None:
        """At the end: everybody has done all slots (or all were dead at once), and faults had no effect beyond their time.

        Within one window after the last fault, and the time-outs that it has set off, a slot commits. Once those that
        crashed are back, and the others have noticed that they were gone, every slot does.
        """
        if not self.net.nodes:
            return
        assert self.finished(), "an island has not finished"
        later = sorted(slot for slot, at in self.offers.items() if at > max(self.calm, self.quiet))
        failed = [slot for slot in later if slot not in self.commits]
        assert not failed, f"slots {failed} failed, though all is well from {later[0]} on"
        expected = [
            at for slot, at in self.offers.items() if at > self.calm or self.commits.get(slot, 0) > self.calm
        ]
        limit = self.fragments * LONGEST_WINDOW_S + TICK_S + DETECT_S + BULK_TIMEOUT_S
        waited = min((at for at in self.commits.values() if at > self.calm), default=math.inf) - self.calm
        assert not expected or waited < limit, f"no slot committed for {waited:.1f} s after the last fault"

    def finished(self) -> bool:
        live = [a for i, a in self.actors.items() if self.net.nodes.get(i) is a.transport]
        return bool(live) and all(a.state.slot >= self.slots for a in live)


def complete(simulation: Simulation) -> None:
    """Run to the end: everybody alive has done all slots, unless the faults killed every island at once."""
    simulation.run()
    simulation.check_progress()


KINDS = ["drop", "delay", "duplicate", "crash sender before", "crash sender after", "crash receiver"]


def single_fault(number: int, kind: str):
    def script(boundary: Boundary) -> Fate:
        if boundary.number != number:
            return Fate()
        return {
            "drop": Fate(delays=()),
            "delay": Fate(delays=(3.0,)),
            "duplicate": Fate(delays=(0.01, 2.0)),
            "crash sender before": Fate(crash=(boundary.sender,), crash_first=True),
            "crash sender after": Fate(crash=(boundary.sender,)),
            "crash receiver": Fate(crash=(boundary.receiver,)),
        }[kind]

    return script


def random_script(seed: int, faults: int, boundaries: int = 120):
    """``faults`` random faults at random boundaries; other messages take a random short time."""
    rng = random.Random(seed)
    plan = {}
    for number in rng.sample(range(boundaries), faults):
        plan[number] = rng.choice(
            ["drop", "delay", "duplicate", "crash_sender", "crash_receiver", "crash_before"]
        )

    def script(boundary: Boundary) -> Fate:
        kind = plan.get(boundary.number)
        delay = rng.uniform(0.001, 0.08)
        if kind == "drop":
            return Fate(delays=())
        if kind == "delay":
            return Fate(delays=(rng.uniform(0.5, 8.0),))
        if kind == "duplicate":
            return Fate(delays=(delay, rng.uniform(0.01, 5.0)))
        if kind == "crash_sender":
            return Fate(delays=(delay,), crash=(boundary.sender,))
        if kind == "crash_receiver":
            return Fate(delays=(delay,), crash=(boundary.receiver,))
        if kind == "crash_before":
            return Fate(crash=(boundary.sender,), crash_first=True)
        return Fate(delays=(delay,))

    return script


def random_simulation(seed: int) -> Simulation:
    """2 or 3 islands, 1 to 4 fragments, 0 to 2 slots of overlap, 1 to 5 faults, all from the seed."""
    islands, fragments = 2 + seed % 2, 1 + seed % 4
    overlap = min(fragments - 1, (seed // 4) % 3)
    script = random_script(seed, faults=1 + seed % 5, boundaries=50 * islands)
    return Simulation(islands, 8, seed, script, fragments, overlap)


def between_owners(script=None) -> Simulation:
    """Three slots of five islands, so that slices have owners, with a codec that loses something."""
    return Simulation(5, 3, seed=0, script=script, codec=LOSSY)


def boundaries_between_owners() -> list[Boundary]:
    """Of the second slot: the owners have residuals by then, and there is one more slot to come."""
    seen: list[Boundary] = []
    complete(between_owners(lambda boundary: seen.append(boundary) or Fate()))
    return [boundary for boundary in seen if boundary.slot == 1]
