"""Islands that do nothing but offer slots over the in-memory network, and the invariants that must hold whatever happens."""

import random
from dataclasses import dataclass, field
from functools import partial

import torch

from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.memory import Boundary, Fate, MemoryNet, MemoryTransport
from torchtitan_diloco.exchange.transport import Hello
from torchtitan_diloco.outer.fragments import Fragment, Piece, TensorSpec
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.semi_sync.wire import Wire

WINDOW_S = 1.0
SIZE = 22  # values of a fragment; in blocks of 4 they make slices of one or two blocks
FP32 = CodecConfig()
LOSSY = CodecConfig(wire="int8", block=4, error_feedback=True)


def fragments_of(count: int) -> tuple[Fragment, ...]:
    """``count`` fragments of ``SIZE`` values each."""
    spec = TensorSpec("w", (SIZE,), torch.float32)
    return tuple(Fragment(i, (Piece(spec, 0, 0, SIZE),)) for i in range(count))


@dataclass
class Actor:
    """One incarnation of an island: trains a slot's worth of steps, sends, and applies ``overlap`` slots later."""

    sim: "Simulation"
    island: int
    incarnation: int
    transport: MemoryTransport
    state: OuterState
    wire: Wire
    steps: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(
        default_factory=dict
    )  # slot not applied yet -> version its delta is based on
    next_slot: int = 0
    log: list[tuple[int, str]] = field(default_factory=list)

    def alive(self) -> bool:
        return self.sim.net.nodes.get(self.island) is self.transport

    def window(self) -> None:
        """Inner steps are done: apply what is due (waiting for it if need be), then send the next slot's fragment."""
        if not self.alive():
            return
        due = self.sent and (len(self.sent) > self.sim.overlap or self.next_slot >= self.sim.slots)
        if due:
            return  # poll() comes back here
        if self.next_slot >= self.sim.slots:
            return
        fragment = self.next_slot % self.sim.fragments
        for f in range(self.sim.fragments):
            self.steps[f] = self.steps.get(f, 0) + 4
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        self.sent[slot] = self.state.states[fragment].version
        self.send(slot, self.steps[fragment])
        self.sim.net.at(WINDOW_S * self.sim.random.uniform(0.5, 1.5), self.window)

    def send(self, slot: int, steps: int) -> None:
        fragment = slot % self.sim.fragments
        state = self.state.states[fragment]
        who = (self.island, self.incarnation, slot)
        local = torch.tensor([float(hash((*who, i)) % 97) for i in range(SIZE)])
        header = Header(
            self.island, slot, fragment, state.version, state.digest, state.lineage, state.tokens,
            steps, steps * 10, True, {f"a/{self.island}": slot + 1}, {}, {"a": "0-4"}, False,
        )  # fmt: skip
        self.transport.offer(header, self.wire.encode(fragment, slot, state.anchor - local))

    def poll(self) -> None:
        if not self.sent or not self.alive():
            return
        waits = len(self.sent) > self.sim.overlap or self.next_slot >= self.sim.slots
        if not waits:
            return
        outcome = self.transport.result(next(iter(self.sent)), 0)
        if outcome is None:
            return
        base = self.sent.pop(outcome.slot)
        self.log.append((outcome.slot, outcome.status))
        fragment = outcome.slot % self.sim.fragments
        taken = self.state.states[fragment].version != base  # from another island meanwhile
        committed = outcome.status == "committed" and not taken
        self.wire.settle(fragment, outcome.slot, committed, committed and self.island in outcome.participants)
        if committed:
            assert outcome.merged is not None
            self.state.commit(
                outcome.slot,
                fragment,
                outcome.merged,
                list(outcome.participants),
                outcome.tokens,
                outcome.advanced,
                outcome.members,
            )
            self.steps[fragment] = 0
        elif outcome.status == "failed" and not taken:
            self.state.fail(outcome.slot)
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
        before = [s.lineage for s in self.state.states]
        try:
            self.transport.heal(self.state)
        except Resumable:
            self.sim.net.at(WINDOW_S, partial(self.heal, slot))
            return
        for fragment, held in enumerate(self.state.states):
            if held.lineage != before[fragment]:
                self.wire.reset(fragment)
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
            self.go_on()

    def offer_again(self, slot: int) -> None:
        if self.alive() and slot in self.sent:
            self.send(slot, 0)


class Simulation:
    """A run of ``islands`` islands for ``slots`` slots under a fault script."""

    def __init__(
        self,
        islands: int,
        slots: int,
        seed: int,
        script=None,
        fragments: int = 1,
        overlap: int = 0,
        codec: CodecConfig = FP32,
    ) -> None:
        self.random = random.Random(seed)
        self.slots, self.fragments, self.overlap = slots, fragments, overlap
        self.islands, self.codec = islands, codec
        self.net = MemoryNet(script)
        self.actors: dict[int, Actor] = {}
        self.incarnations = 0
        for island in range(islands):
            self.start(island)
        self.net.on_crash = self.crashed

    def start(self, island: int) -> None:
        if island in self.net.nodes:
            return
        self.incarnations += 1
        anchors = [torch.zeros(SIZE) for _ in range(self.fragments)]
        state = OuterState.found(fragments_of(self.fragments), OuterSGD(0.7, 0.9, True), anchors)
        wire = Wire(self.codec, MergeConfig(), state.fragments, "run", island, self.islands)
        transport = MemoryTransport(merge=wire.merge, net=self.net)
        hello = Hello(island, f"{self.incarnations:05d}", 0.0, "run", 0, {}, 0)
        transport.join(hello, state)
        self.actors[island] = Actor(
            self, island, self.incarnations, transport, state, wire, next_slot=state.slot
        )
        self.net.at(WINDOW_S * self.random.uniform(0.5, 1.5), self.actors[island].window)

    def crashed(self, island: int) -> None:
        """A crashed island comes back, as long as another holds the run's state."""

        def again() -> None:
            if self.net.nodes:
                self.start(island)

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
        """No two living islands hold different bits for one version of a fragment, or a residual of the same slice."""
        seen: dict[tuple[int, int], str] = {}
        owned: dict[tuple[int, str], int] = {}
        for island, actor in self.living().items():
            for f, state in enumerate(actor.state.states):
                value = seen.setdefault((f, state.version), state.digest)
                assert value == state.digest, f"version {state.version} of fragment {f} has two digests"
            for name in actor.wire.merge.residuals():
                f = int(name.removeprefix("residual.").partition("[")[0])
                owner = owned.setdefault((actor.state.states[f].version, name), island)
                assert owner == island, f"islands {owner} and {island} both have {name}"

    def living(self) -> dict[int, Actor]:
        return {i: a for i, a in self.actors.items() if self.net.nodes.get(i) is a.transport}

    def finished(self) -> bool:
        live = self.living().values()
        return bool(live) and all(a.state.slot >= self.slots for a in live)


def complete(simulation: Simulation) -> None:
    """Run to the end: everybody alive has done all slots, unless the faults killed every island at once."""
    simulation.run()
    assert simulation.finished() or not simulation.net.nodes, "an island has not finished"


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


def random_large_simulation(seed: int) -> Simulation:
    """5 or 6 islands, so that slices have owners, with a codec that loses something; the rest as above."""
    islands, fragments = 5 + seed % 2, 1 + seed % 3
    overlap = min(fragments - 1, (seed // 3) % 3)
    script = random_script(seed, faults=1 + seed % 6, boundaries=150 * islands)
    return Simulation(islands, 6, seed, script, fragments, overlap, LOSSY)


def between_owners(script=None) -> Simulation:
    """Three slots of five islands, so that slices have owners, with a codec that loses something."""
    return Simulation(5, 3, seed=0, script=script, codec=LOSSY)


def boundaries_between_owners() -> list[Boundary]:
    """Of the second slot: the owners have residuals by then, and there is one more slot to come."""
    seen: list[Boundary] = []
    complete(between_owners(lambda boundary: seen.append(boundary) or Fate()))
    return [boundary for boundary in seen if boundary.slot == 1]
