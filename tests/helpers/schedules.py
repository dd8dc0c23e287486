"""Islands that read samples and exchange slots over the in-memory network, and an account of ids kept beside them.

The islands use the real method, outer state, shares, walk through the data and ledger. The account (``Truth``) knows nothing
of streams or positions: it sees the ids that inner steps used and which offers entered which committed slot, and does set
arithmetic. An offer is recognised by its token count, which carries its serial number.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.config.own import MergeConfig, SemiSyncConfig
from torchtitan_diloco.data.audit import Account, Report, audit
from torchtitan_diloco.data.ledger import LEDGER, READING, Ledger, read_ledger, read_reading
from torchtitan_diloco.data.streams import Picks, Source, ids_of
from torchtitan_diloco.data.walk import Walk
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.outer.fragments import Fragment, TensorSpec
from torchtitan_diloco.outer.shares import split
from torchtitan_diloco.outer.values import Flat, Strung, whole
from torchtitan_diloco.semi_sync import Setup
from torchtitan_diloco.semi_sync.diloco import DiLoCo

SERIAL_BITS = 24
WINDOW_S = 1.0
Sample = tuple[str, int, int]
"""(source, epoch, id)"""


def source(name: str, samples: int, shards: int, weight: float = 1.0, present: str = "") -> Source:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Source.cut(digest, samples, shards=shards, seed=3, weight=weight, present=present)


class Weights:
    """Two numbers in place of a model."""

    specs = {"w": TensorSpec("w", (2,), torch.float32)}

    def __init__(self) -> None:
        self.local = torch.zeros(2)

    def present(self, fragment: Fragment) -> Strung:
        return Flat(self.local.clone())

    def scatter(self, fragment: Fragment, flat: torch.Tensor | None, alpha: float = 0.0) -> None:
        assert flat is not None and alpha == 0.0
        self.local = flat.clone()


@dataclass
class Feed:
    """A loader without tensors."""

    sources: list[Source]
    batch: int
    island: int
    walk: Walk = field(init=False)

    def __post_init__(self) -> None:
        self.walk = Walk(self.sources, self.batch, phase=self.island)
        self.holds, self.positions, self.assign = self.walk.holds, self.walk.positions, self.walk.assign

    def describe(self) -> dict[str, Any]:
        about = {s.name: {"path": s.name, "samples": s.samples, "shards": s.shards} for s in self.sources}
        return {"seed": 0, "sources": about}

    def next_batch(self) -> list[Sample]:
        source, ids, epochs = self.walk.next_batch(0, self.batch)
        rows = zip(source.tolist(), epochs.tolist(), ids.tolist(), strict=True)
        return [(self.sources[s].name, epoch, number) for s, epoch, number in rows]


@dataclass
class Truth:
    """Every sample's fate, from ids alone."""

    read: set[Sample] = field(default_factory=set)
    offers: dict[int, list[Sample]] = field(default_factory=dict)
    slots: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Lineage -> (lineage before, serials of the offers that count)."""

    def committed(self, parent: str, lineage: str, outcome: Outcome) -> None:
        mask = (1 << SERIAL_BITS) - 1
        serials = tuple(outcome.tokens >> (SERIAL_BITS * i) & mask for i in outcome.participants)
        assert self.slots.setdefault(lineage, (parent, serials)) == (parent, serials)

    def consumed(self, lineage: str) -> Counter[Sample]:
        """How often each sample entered the history that ends in ``lineage``."""
        counts: Counter[Sample] = Counter()
        while lineage:
            lineage, serials = self.slots[lineage]
            for serial in serials:
                counts.update(self.offers[serial])
        return counts


@dataclass
class Actor:
    """One incarnation of an island."""

    sim: "Schedule"
    island: int
    incarnation: str
    feed: Feed
    weights: Weights
    method: DiLoCo
    transport: MemoryTransport
    ledger: Ledger
    pending: list[Sample] = field(default_factory=list)
    outcome: Outcome | None = None
    healing: bool = False

    @property
    def alive(self) -> bool:
        return self.sim.net.nodes.get(self.island) is self.transport

    def history(self) -> list[tuple[str, str]]:
        assert self.method.outer is not None
        return [(state.digest, state.lineage) for state in self.method.outer.states]

    def enter(self, checkpoint: "tuple[Any, ...] | None") -> None:
        sim, method = self.sim, self.method
        method.outer = method._found([whole(self.weights.present(f)) for f in method.fragments])
        if checkpoint is not None:
            (description, tensors), positions, self.weights.local, self.pending = checkpoint
            self.pending = list(self.pending)
            method.restore(description, tensors)
            self.feed.assign(positions)
        before = self.history()
        method._take_state(method._enter, 0)
        if self.history() != before:
            self.pending = []
        sim.net.at(sim.pause(), self.window)

    def window(self) -> None:
        """Some inner steps, then the slot."""
        sim, method = self.sim, self.method
        if not self.alive or method.outer is None or method.outer.slot >= sim.slots:
            return
        for _ in range(0 if method.data.idle else sim.random.randrange(1, sim.steps + 1)):
            samples = self.feed.next_batch()
            self.pending += samples
            sim.truth.read.update(samples)
            self.weights.local -= sim.random.random()
            method.count(0, 1)
            if sim.random.random() < sim.save:
                self.save()
            if sim.random.random() < sim.kill:
                return sim.net.crash(self.island)
        if sim.random.random() < sim.poison and self.pending:
            self.weights.local[0] = float("nan")
        serial = len(sim.truth.offers)
        sim.truth.offers[serial] = list(self.pending)
        method.tokens = [serial << (SERIAL_BITS * self.island)]
        method.send(method.outer.slot, 0)

    def poll(self) -> None:
        method = self.method
        if not self.alive or method.outer is None or not method.flights or self.healing:
            return None
        parent, flight = method.outer.lineage, method.flights[0]
        outcome = method.poll(flight, 0)
        if outcome is None:
            return None
        if outcome.status == "failed" and not flight.finite:
            self.pending = []
        if outcome.status == "committed":
            self.sim.truth.committed(parent, method.outer.lineage, outcome)
            self.pending = []
        self.outcome = outcome
        return self.settle()

    def settle(self) -> None:
        assert self.outcome is not None
        if not self.alive:
            return
        sim = self.sim
        flight, before = self.method.flights[0], self.history()
        try:
            self.method.settle(self.outcome, 0, 0.0)
        except Resumable:  # nobody to heal from at the moment
            self.method.flights.insert(0, flight)
            self.healing = True
            sim.net.at(WINDOW_S, self.settle)
            return
        if self.history() != before:  # else what it had missed had failed: it goes on with its own weights
            self.pending = []
        self.healing = False
        self.transport.publish(self.method.outer)
        if self.method.flights:  # behind, and nobody has published the slot: it was sent again
            serial = len(sim.truth.offers)
            sim.truth.offers[serial] = []
            return
        if sim.random.random() < sim.save:
            self.save()
        if sim.random.random() < sim.leaving:
            self.transport.leave("test")
            sim.gone(self.island)
            return
        sim.net.at(sim.pause(), self.window)

    def save(self) -> None:
        kept = (self.method.state(), self.feed.positions(), self.weights.local.clone(), list(self.pending))
        self.sim.checkpoints[self.island] = kept


class Schedule:
    """A run under a fault script. holdings: sources of each island. before: the run, stopped, that this one goes on with."""

    def __init__(
        self,
        folder: Path,
        holdings: list[list[Source]],
        seed: int,
        script: Any = None,
        *,
        slots: int = 6,
        calm: bool = False,
        before: "Schedule | None" = None,
    ) -> None:
        self.random = random.Random(seed)
        self.folder, self.holdings, self.slots = folder, holdings, slots
        self.batch, self.steps = self.random.randrange(1, 4), self.random.randrange(1, 4)
        self.save = self.random.choice([0.0, 0.2, 0.6])
        self.kill = self.random.choice([0.0, 0.0, 0.02, 0.05])
        self.poison = self.random.choice([0.0, 0.0, 0.1])
        self.leaving = self.random.choice([0.0, 0.0, 0.05])
        self.revivals = self.random.choice([0, 1])
        late = self.random.randrange(len(holdings)) if self.random.random() < 0.3 else 0
        if calm:
            self.batch, self.steps, self.save = 2, 3, 1.0
            self.kill = self.poison = self.leaving = 0.0
            self.revivals = late = 0
        self.net = MemoryNet(script)
        self.truth = before.truth if before else Truth()
        self.actors: dict[int, Actor] = {}
        self.every: list[Actor] = []
        self.checkpoints: dict[int, Any] = before.checkpoints if before else {}
        self.ticks = before.ticks if before else 0
        self.net.now = before.net.now if before else 0.0
        self.founders = len(holdings) - late
        for island in range(len(holdings)):
            if island < self.founders:
                self.start(island)
            else:
                self.net.at(self.random.uniform(1.0, 6.0), partial(self.start, island))
        self.net.on_crash = self.gone

    def pause(self) -> float:
        return WINDOW_S * self.random.uniform(0.5, 1.5)

    def start(self, island: int) -> None:
        if island in self.net.nodes or (not self.net.nodes and self.every and not self.revivals):
            return
        incarnation = f"{len(self.every):05d}"
        feed, weights = Feed(self.holdings[island], self.batch, island), Weights()
        ledger = Ledger(self.folder / f"island-{island}", island, clock=self.tick)
        transport: list[MemoryTransport] = []

        def make(merge: Any) -> MemoryTransport:
            if not transport:
                transport.append(MemoryTransport(merge, self.net))
            return transport[0]

        config = SemiSyncConfig(num_islands=self.founders, sync_every=1, merge=MergeConfig(weight="equal"))
        setup = Setup(
            config=config, steps=10**6, island=island, incarnation=incarnation, started=0.0, run_id="run",
            group=IslandGroup(), parameters=weights, trace=Trace(None, island, incarnation), drain=DrainFlag(),
            make_transport=make, feed=feed, ledger=ledger,
        )  # fmt: skip
        method = DiLoCo(setup)
        method.retry_s = 0.0
        make(method.wire.merge)
        actor = Actor(self, island, incarnation, feed, weights, method, transport[0], ledger)
        self.actors[island] = actor
        self.every.append(actor)
        actor.enter(self.checkpoints.get(island))

    def tick(self) -> float:
        """The clock of the ledgers: virtual time, later at every call."""
        self.ticks += 1
        return self.net.now + self.ticks * 1e-9

    def gone(self, island: int) -> None:
        """It comes back, after everything stood still at most once."""
        if island in self.actors:
            self.actors[island].ledger.close()
        if not self.net.nodes and self.revivals:
            self.revivals -= 1
            self.net.at(self.random.uniform(1.0, 6.0), partial(self._revive, island))
        elif self.net.nodes:
            self.net.at(self.random.uniform(1.0, 6.0), lambda: self.start(island) if self.net.nodes else None)

    def _revive(self, island: int) -> None:
        self.revivals += 1
        self.start(island)
        self.revivals -= 1

    def run(self, limit: int = 200_000) -> None:
        for _ in range(limit):
            if not self.net.step():
                return
            for actor in list(self.actors.values()):
                actor.poll()
        raise AssertionError("the run does not come to an end")

    # ---- comparison ------------------------------------------------------------------------------------------------

    def accounts(self) -> list[Account]:
        found = []
        for folder in sorted(self.folder.glob("island-*")):
            entries, broken = read_ledger(folder / LEDGER)
            assert broken == 0
            found.append(Account(int(folder.name[7:]), entries, read_reading(folder / READING)))
        return found

    def check(self) -> Report:
        """Hold the audit against the truth; returns the audit."""
        report = audit(self.accounts())
        assert report.problems == []
        consumed = self.truth.consumed(report.lineage)
        assert max(consumed.values(), default=0) <= 1, "a sample entered the anchor twice"
        live = {a.method.outer.lineage for a in self.actors.values() if a.alive and a.method.outer}
        if self.finished():
            # One that came with more of a history of its own when no slot was left has met nobody who would take it.
            unmet = any(a.outcome is None for a in self.actors.values() if a.alive)
            assert report.lineage in live and (len(live) == 1 or unmet)
        for row in report.epochs:
            ids = {s for s in consumed if s[:2] == (row.source, row.epoch)}
            assert row.consumed == len(ids), row
            assert row.repeated == row.in_flight == 0
            lost = {s for s in self.truth.read - consumed.keys() if s[:2] == (row.source, row.epoch)}
            assert self.lost_ids(row.source, report, row.epoch) == lost, row
            total = row.consumed + row.lost + row.deferred + row.unread
            assert total == row.samples and row.lost == len(lost), row
        seen = {(row.source, row.epoch) for row in report.epochs}
        assert {s[:2] for s in self.truth.read} <= seen
        return report

    def lost_ids(self, source: str, report: Report, epoch: int) -> set[Sample]:
        by_name = {s.name: s for holding in self.holdings for s in holding}
        found: set[Sample] = set()
        for row in report.epochs:
            if (row.source, row.epoch) != (source, epoch):
                continue
            for lost in row.ranges:
                shard = split(lost.stream)[1]
                count = lost.end - lost.begin
                numbers = torch.arange(lost.begin, lost.end).numpy()
                picks = Picks(numbers * 0, numbers * 0 + shard, numbers)
                ids, epochs = ids_of(picks, [by_name[source]])
                assert set(epochs.tolist()) <= {epoch} and count > 0
                found |= {(source, epoch, number) for number in ids.tolist()}
        return found

    def finished(self) -> bool:
        alive = [a for a in self.actors.values() if a.alive]
        return bool(alive) and all(a.method.outer.slot >= self.slots for a in alive)

    def close(self) -> None:
        for actor in self.every:
            actor.ledger.close()
