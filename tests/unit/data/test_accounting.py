"""Field cases of sample accounting, on the in-memory network with the real method and ledger."""

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.schedules import Feed, Sample, Schedule, source
from torchtitan_diloco.data.audit import Account, Report, audit
from torchtitan_diloco.data.ledger import LEDGER, READING, Ledger, read_ledger, read_reading
from torchtitan_diloco.exchange.memory import Boundary, Fate
from torchtitan_diloco.semi_sync.none import NoSync


def test_fr52_nothing_is_lost_or_repeated_while_an_island_is_away(tmp_path: Path) -> None:
    """Three shards, three islands; the third crashes after two slots and comes back five slots later."""
    holdings = [[source("a", 200, shards=3)] for _ in range(3)]
    run = Schedule(tmp_path, holdings, seed=1, slots=10, calm=True)
    committed = lambda: max(a.method.outer.slot for a in run.actors.values())
    run.net.on_crash = lambda island: None
    crashed = back = False

    def watch() -> None:
        nonlocal crashed, back
        if not crashed and committed() >= 2:
            crashed = True
            run.net.crash(2)
        if crashed and not back and committed() >= 7:
            back = True
            run.start(2)
        if not back:
            run.net.at(0.1, watch)

    run.net.at(0.1, watch)
    run.run()
    run.close()
    assert crashed and back and run.finished()
    report = run.check()  # equal to the account of ids
    accounts = {account.island: account for account in run.accounts()}
    commits = [e for e in accounts[0].entries if e["kind"] == "commit"]
    alone = [e["slot"] for e in commits if "2" not in e["members"]]
    assert 4 <= len(alone) <= 6
    for entry in commits:  # its shard was read on by the others while it was away
        if entry["slot"] in alone[1:]:
            assert len(entry["members"]) == 2 and sum(map(len, entry["consumed"].values())) == 3
    assert sum(row.lost + row.deferred for row in report.epochs) == 0

    # The position of the crashed island is known although its disk is gone.
    shutil.rmtree(tmp_path / "island-2")
    survivors = audit([accounts[0]])
    assert survivors.ok
    assert [row.consumed for row in survivors.epochs] == [row.consumed for row in report.epochs]


def test_fr16_a_run_goes_on_with_one_island_and_then_with_three(tmp_path: Path) -> None:
    whole = [source("a", 60, shards=7), source("b", 20, shards=7, weight=0.5)]
    two = Schedule(tmp_path, [whole, whole], seed=2, slots=3, calm=True)
    two.run()
    two.close()
    consumed = sum(row.consumed for row in two.check().epochs)
    one = Schedule(tmp_path, [whole], seed=3, slots=6, calm=True, before=two)
    one.run()
    one.close()
    report = one.check()
    assert report.slot == 5 and sum(row.consumed for row in report.epochs) > consumed
    # After one slot it reads what both had read, from where the other stood.
    names, settled = one.actors[0].feed.positions(), one.actors[0].method.outer.positions
    assert len(names) == 14 and names == dict.fromkeys(names, 0) | settled
    three = Schedule(tmp_path, [whole, whole, whole], seed=4, slots=9, calm=True, before=one)
    three.run()
    three.close()
    report = three.check()
    assert report.slot == 8
    shares = [set(actor.feed.positions()) for actor in three.actors.values()]
    assert sum(map(len, shares)) == len(set.union(*shares)) == 14
    assert sum(row.lost for row in report.epochs) == 0


def test_samples_of_a_non_finite_window_are_lost_with_their_cause(tmp_path: Path) -> None:
    whole = [source("a", 50, shards=4)]
    for islands in (1, 2):
        run = Schedule(tmp_path / str(islands), [whole] * islands, seed=5, slots=5, calm=True)
        poisoned = run.actors[0]
        count, window = iter(range(100)), poisoned.window

        def bad_window(actor=poisoned, window=window, count=count) -> None:
            actor.sim.poison = 1.0 if next(count) == 1 else 0.0
            window()
            actor.sim.poison = 0.0

        poisoned.window = bad_window
        run.net._events = [
            (t, n, bad_window if action == window else action) for t, n, action in run.net._events
        ]
        run.run()
        run.close()
        report = run.check()
        lost = [r for row in report.epochs for r in row.ranges]
        assert lost and all("the weights of island 0 were not finite at slot" in r.cause for r in lost)
        assert report.slot == 4 and run.finished()


def test_a_ledger_that_repeats_samples_or_leaves_a_gap_is_broken(tmp_path: Path) -> None:
    run = Schedule(tmp_path, [[source("a", 20, shards=2)]], seed=6, slots=4, calm=True)
    run.run()
    run.close()
    (account,) = run.accounts()
    commits = [e for e in account.entries if e["kind"] == "commit"]
    (name, (begin, end)) = next(iter(commits[2]["consumed"]["0"].items()))
    commits[2]["consumed"]["0"][name] = [begin - 1, end]
    report = audit([account])
    assert not report.ok and sum(row.repeated for row in report.epochs) == 1
    assert f"stream {name}: positions {begin - 1} to {begin} (epoch" in report.problems[0]
    commits[2]["consumed"]["0"][name] = [begin + 1, end]
    assert any(f"goes on at {begin + 1}, but stood at {begin}" in p for p in audit([account]).problems)


class Plain:
    """An island that trains on its own, over starts, crashes and checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.read = folder, Counter[Sample]()
        self.saved: tuple[int, dict[str, int], Counter[Sample]] = (0, {}, Counter())

    def start(self) -> None:
        self.feed = Feed([source("a", 20, shards=3), source("b", 9, shards=2)], batch=4, island=0)
        self.ledger = Ledger(self.folder, 0)
        self.step, positions, read = self.saved
        if positions:
            self.feed.assign(positions)
        self.read = read.copy()
        setup = SimpleNamespace(island=0, feed=self.feed, ledger=self.ledger)
        self.method = NoSync(setup)  # type: ignore[arg-type]
        assert self.method.join(self.step) == self.step

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.read.update(self.feed.next_batch())
            self.step += 1
            self.method.after_inner_step(self.step, 10)

    def save(self) -> None:
        assert self.method.state() == ({}, {})
        self.saved = (self.step, self.feed.positions(), self.read.copy())

    def audit(self, running: bool = False) -> Report:
        entries, broken = read_ledger(self.folder / LEDGER)
        assert broken == 0
        account = Account(0, entries, read_reading(self.folder / READING), running)
        report = audit([account])
        assert report.ok and not report.slots and report.notes == []
        assert set(self.read.values()) <= {1}
        for row in report.epochs:
            mine = sum(source == row.source and epoch == row.epoch for source, epoch, _ in self.read)
            assert row.consumed == mine
        return report


@pytest.mark.parametrize("saves", [True, False])
def test_an_island_alone_keeps_an_account_without_slots(saves: bool, tmp_path: Path) -> None:
    island = Plain(tmp_path)
    for number, steps in enumerate((7, 5, 3, 9)):  # into the third epoch, with a crash after each
        island.start()
        island.audit()
        island.train(steps)
        island.audit(running=True)
        if saves:
            island.save()
            island.audit()
            island.train(2)  # will be read again, and is no repeat then
        report = island.audit()
        assert sum(row.lost + row.in_flight + row.deferred for row in report.epochs) <= (0 if saves else 28)
        island.ledger.close()
        assert report.slot == (island.saved[0] if saves else 0), number
    assert len(report.epochs) >= 3


def test_an_older_checkpoint_that_an_island_alone_goes_on_from_is_what_counts(tmp_path: Path) -> None:
    island = Plain(tmp_path)
    island.start()
    island.train(2)
    island.save()
    older = island.saved
    island.train(3)
    island.save()
    island.ledger.close()
    island.saved = older
    island.start()
    lost = [r for row in island.audit().epochs for r in row.ranges]
    assert lost and all("step 5 belongs to a history that was not continued" in r.cause for r in lost)
    island.train(5)
    assert [r for row in island.audit().epochs for r in row.ranges] == []


def test_a_crash_of_all_islands_loses_only_what_nobody_read_again(tmp_path: Path) -> None:
    def script(boundary: Boundary) -> Fate:
        return Fate(crash=(0, 1)) if boundary.number == 25 else Fate()

    run = Schedule(tmp_path, [[source("a", 200, shards=4)]] * 2, seed=7, script=script, slots=9, calm=True)
    run.run()
    run.close()
    report = run.check()
    lost = [r for row in report.epochs for r in row.ranges]
    assert lost and all("stopped or failed before its slot was committed" in r.cause for r in lost)
