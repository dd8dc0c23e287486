"""Islands that do nothing but offer slots over the in-memory network, and the invariants that must hold whatever happens."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import torch

from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.memory import Boundary, Fate, MemoryNet, MemoryTransport
from torchtitan_diloco.exchange.transport import Hello
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import mean
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterState

FRAGMENTS = whole_model([TensorSpec("w", (3,), torch.float32)])
WINDOW_S = 1.0


@dataclass
class Actor:
    """One incarnation of an island: trains for a window, offers, applies, again."""

    sim: "Simulation"
    island: int
    incarnation: int
    transport: MemoryTransport
    state: OuterState
    steps: int = 0
    busy: bool = False
    log: list[tuple[int, str]] = field(default_factory=list)

    def window(self) -> None:
        if self.sim.net.nodes.get(self.island) is not self.transport or self.state.slot >= self.sim.slots:
            return
        self.steps += 4
        anchor = self.state.states[0]
        noise = torch.tensor(
            [float(hash((self.island, self.incarnation, self.state.slot, i)) % 97) for i in range(3)]
        )
        header = Header(
            self.island, self.state.slot, 0, anchor.version, anchor.digest, self.state.lineage,
            self.state.tokens_total, self.steps, self.steps * 10, True,
            {f"a/{self.island}": self.state.slot + 1}, {}, {"a": "0-4"}, False,
        )  # fmt: skip
        self.busy = True
        self.transport.offer(header, anchor.anchor - noise)

    def poll(self) -> None:
        if not self.busy or self.sim.net.nodes.get(self.island) is not self.transport:
            return
        outcome = self.transport.result(0)
        if outcome is None:
            return
        self.busy = False
        self.log.append((outcome.slot, outcome.status))
        if outcome.status == "committed":
            assert outcome.merged is not None
            before = self.state.states[0].version
            new = self.state.commit(
                outcome.slot, 0, outcome.merged, list(outcome.participants), outcome.tokens,
                outcome.advanced, outcome.members,
            )  # fmt: skip
            assert new.version == before + 1
            self.steps = 0
            self.sim.note(self)
        elif outcome.status == "failed":
            self.state.fail(outcome.slot)
        elif outcome.status == "behind":
            self.heal()
            return
        self.go_on()

    def go_on(self) -> None:
        self.transport.publish(self.state)
        self.sim.net.at(WINDOW_S * self.sim.random.uniform(0.5, 1.5), self.window)

    def heal(self) -> None:
        """Take the state of another island; wait for one if the schedule has just killed the rest."""
        if self.sim.net.nodes.get(self.island) is not self.transport:
            return
        try:
            self.transport.heal(self.state)
        except Resumable:
            self.sim.net.at(WINDOW_S, self.heal)
            return
        self.steps = 0
        self.go_on()


class Simulation:
    """A run of ``islands`` islands for ``slots`` slots under a fault script."""

    def __init__(self, islands: int, slots: int, seed: int, script=None) -> None:
        self.random = random.Random(seed)
        self.slots = slots
        self.net = MemoryNet(script)
        self.actors: dict[int, Actor] = {}
        self.digests: dict[tuple[int, str], set[str]] = defaultdict(set)
        self.incarnations = 0
        for island in range(islands):
            self.start(island)
        self.net.on_crash = self.crashed

    def start(self, island: int) -> None:
        if island in self.net.nodes:
            return
        self.incarnations += 1
        state = OuterState.found(FRAGMENTS, OuterSGD(0.7, 0.9, True), [torch.zeros(3)])
        transport = MemoryTransport(merge=partial(mean, kind="tokens"), net=self.net)
        hello = Hello(island, f"{self.incarnations:05d}", 0.0, "run", 0, {}, 0)
        transport.join(hello, state)
        self.actors[island] = Actor(self, island, self.incarnations, transport, state)
        self.net.at(WINDOW_S * self.random.uniform(0.5, 1.5), self.actors[island].window)

    def crashed(self, island: int) -> None:
        """A crashed island comes back, as long as another holds the run's state."""

        def again() -> None:
            if self.net.nodes:
                self.start(island)

        self.net.at(self.random.uniform(1.0, 6.0), again)

    def note(self, actor: Actor) -> None:
        """Two living islands never hold different bits for one version of one history's slot."""
        fragment = actor.state.states[0]
        assert fragment.digest == digest(fragment.anchor)

    def run(self, limit: int = 200_000) -> None:
        for _ in range(limit):
            if not self.net.step():
                return
            for actor in self.actors.values():
                actor.poll()
            self.check()
        raise AssertionError("the run does not come to an end")

    def check(self) -> None:
        live = [a for i, a in self.actors.items() if self.net.nodes.get(i) is a.transport]
        seen: dict[int, str] = {}
        for actor in live:
            fragment = actor.state.states[0]
            assert seen.setdefault(fragment.version, fragment.digest) == fragment.digest, (
                f"version {fragment.version} has two digests"
            )

    def finished(self) -> bool:
        live = [a for i, a in self.actors.items() if self.net.nodes.get(i) is a.transport]
        return bool(live) and all(a.state.slot >= self.slots for a in live)


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
