"""A hub whose parts are spread over workers: the same bits, and nothing is lost with a worker or with the coordinator."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.golden.hub_run import HubRun
from tests.golden.island import Case, Plan
from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_process import HubProcess
from torchtitan_diloco.config.own import CodecConfig
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.worker_process import Crewed

SIZES = (1000, 300, 700, 50)
PLAIN, INT8 = CodecConfig(), CodecConfig(wire="int8", error_feedback=True)
STREAMING = [Plan(8, 17), Plan(8, 17, rows=3), Plan(8, 17, rows=1)]
CASES = {
    "fp32": Case(fragments=4, overlap=3, alpha=0.5),
    "int8, feedback": Case(wire="int8", feedback=True, fragments=4, overlap=3, alpha=0.5),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_with_workers_the_anchors_are_the_references_bit_for_bit(case: Case, tmp_path: Path) -> None:
    without = HubRun(case, STREAMING).check(tmp_path / "without")
    spread = HubRun(case, STREAMING, workers=2).check(tmp_path / "spread")
    assert len(spread) >= 8
    assert [(r.slot, r.digest) for r in spread] == [(r.slot, r.digest) for r in without]


class Run:
    """Two islands at a hub in a process of its own."""

    def __init__(self, folder: Path, codec: CodecConfig, **settings: object) -> None:
        self.hub = HubProcess(folder, heartbeat_timeout_s=30.0, **settings)
        self.hub.start()
        self.islands = [HubIsland(i, [self.hub.url], 2, SIZES, codec, patience_s=120.0) for i in range(2)]
        together([island.join for island in self.islands])

    def slots(self, until: int) -> None:
        together([lambda i=i: i.run(until) for i in self.islands])  # type: ignore[misc]

    def half_a_slot(self) -> int:
        """The next slot is open, and one island's contribution to it is at the hub."""
        first, slot = self.islands[0], self.islands[0].state.slot
        first.offer(slot)
        end = time.monotonic() + 20
        while not ((waiting := first.transport.waiting()) and waiting.target == (1,)):
            assert time.monotonic() < end, waiting
            time.sleep(0.01)
        return slot

    def other_half(self, slot: int) -> None:
        first, second = self.islands
        second.offer(slot)
        together([lambda: first.settle(slot), lambda: second.settle(slot)])

    def end(self) -> list[HubIsland]:
        for island in self.islands:
            island.transport.leave("done")
        return self.islands


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(name: str, codec: CodecConfig, **settings: object) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        runs.append(Run(folder, codec, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.hub.kill()


def same(one: HubIsland, other: HubIsland) -> None:
    assert one.state.describe() == other.state.describe()
    for name, tensor in one.state.tensors().items():
        assert torch.equal(tensor, other.state.tensors()[name])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("codec, save_every", [(PLAIN, 1), (PLAIN, 3), (INT8, 2)], ids=["1", "3", "int8"])
def test_nothing_is_lost_with_a_worker_or_the_coordinator_in_the_middle_of_a_slot(
    start: Callable[..., Run], codec: CodecConfig, save_every: int
) -> None:
    run = start("spread", codec, workers=2, save_every=save_every)
    run.slots(5)

    slot = run.half_a_slot()
    children = run.hub.workers()
    assert len(children) == 2
    children[slot % 2].kill()
    assert run.hub.ended() == 75, "it can be started again, and says so"
    assert "is lost" in run.hub.log.read_text() and "Traceback" not in run.hub.log.read_text()
    assert psutil.wait_procs(children, 10)[1] == []
    run.hub.start()
    run.other_half(slot)
    run.slots(9)

    slot = run.half_a_slot()
    children = run.hub.workers()
    run.hub.kill()
    assert psutil.wait_procs(children, 10)[1] == [], "workers do not outlive their hub"
    run.hub.start()
    run.other_half(slot)
    run.slots(14)
    one, other = run.end()
    assert [status for _, status in one.statuses if status not in ("committed", "behind")] == []
    same(one, other)
    for fragment in range(4):
        seen = [
            {(o.slot, o.advance.digest) for o in i.outcomes if o.slot % 4 == fragment and o.advance}
            for i in (one, other)
        ]
        assert seen[0] == seen[1], "one version, one digest"
    if codec is PLAIN:  # what the hub's encoding had lost and was not saved, it begins anew
        undisturbed = start("undisturbed", codec)
        undisturbed.slots(14)
        same(one, undisturbed.end()[0])


@pytest.mark.timeout(120)
def test_a_run_goes_on_with_another_number_of_workers_and_without_any(tmp_path: Path) -> None:
    """What they have written is found again, whoever owns it now."""
    islands = [HubIsland(i, ["http://none"], 2, SIZES, INT8) for i in range(2)]
    for number, workers in enumerate((2, 3, 0, 2)):
        crewed = Crewed(workers)
        server = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=20.0), tmp_path / "hub", crewed=crewed)
        thread = server.in_thread()
        try:
            fresh = [
                HubIsland(i, [server.url], 2, SIZES, INT8, incarnation=str(number), started=number)
                for i in range(2)
            ]
            for island, before in zip(fresh, islands, strict=True):
                island.state, island.wire = before.state, before.wire
                if number == 2:  # this time the state comes from the hub alone
                    island.state = HubIsland(island.island, ["http://none"], 2, SIZES, INT8).state
            together(
                [
                    lambda i=i, to=4 * number + 4: (i.join(), i.run(to), i.transport.leave("done"))
                    for i in fresh
                ]
            )  # type: ignore[misc]
        finally:
            server.stop()
            thread.join(20)
        assert [status for _, status in fresh[0].statuses] == ["committed"] * 4
        same(*fresh)
        islands = fresh


def test_a_joiner_takes_the_state_from_the_workers(make_hub, tmp_path: Path) -> None:
    hub: HubServer = make_hub(folder=tmp_path, crewed=Crewed(2))
    founders = [HubIsland(i, [hub.url], 2, SIZES, INT8) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(6)) for i in founders])
    workers = httpx.get(f"{hub.url}/status", trust_env=False).json()["workers"]
    assert [(worker["fragments"], worker["values"]) for worker in workers] == [([0, 3], 1050), ([1, 2], 1000)]
    joiner = HubIsland(2, [hub.url], 2, SIZES, INT8)
    fetched: list[str] = []
    get = joiner.transport._get
    joiner.transport._get = lambda path, *to: (fetched.append(path), get(path, *to))[1]
    joined = joiner.join()
    assert [heal.bytes for heal in joined.heals] == [2 * 4 * sum(SIZES)]
    same(joiner, founders[0])
    assert len(fetched) == 8 and all(path.startswith(":") and "/parts/" in path for path in fetched)
    assert len({path.partition("/")[0] for path in fetched}) == 2, "both workers have been asked"
    together([lambda i=i: (i.run(10), i.transport.leave("done")) for i in (*founders, joiner)])
    same(joiner, founders[0])
    assert joiner.outcomes[-1].participants == (0, 1, 2)


def test_islands_that_are_further_than_the_hub_bring_their_state_to_the_workers(
    make_hub, tmp_path: Path
) -> None:
    """The hub's folder is lost: the islands, started again, found it anew with what they hold."""
    first: HubServer = make_hub(folder=tmp_path / "first", crewed=Crewed(2))
    before = [HubIsland(i, [first.url], 2, SIZES) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(6), i.transport.leave("done")) for i in before])
    second: HubServer = make_hub(folder=tmp_path / "second", crewed=Crewed(2))
    after = [HubIsland(i, [second.url], 2, SIZES, incarnation="b", started=1.0) for i in range(2)]
    after[1].state = before[1].state
    together([lambda i=i: (i.join(), i.run(9), i.transport.leave("done")) for i in after])
    same(*after)
    assert after[0].heals == 1 and after[0].state.slot == 9
    assert [status for _, status in after[0].statuses] == ["committed"] * 3
