"""When faults are brought and lifted: scripted islands and clock, no process."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.cli.chaos.levers import RECORD, Chaos
from torchtitan_diloco.cli.chaos.plan import Fault, Plan
from torchtitan_diloco.cli.local.supervisor import Island, Phase
from torchtitan_diloco.cli.stop import StopRequests
from torchtitan_diloco.observe.injection import INJECT


class Process:
    """Notes what was done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def terminate(self) -> None:
        self.done.append("terminate")

    def suspend(self) -> None:
        self.done.append("suspend")

    def resume(self) -> None:
        self.done.append("resume")

    def rlimit(self, which: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        if limits is not None:
            self.done.append(f"limit {limits[0]}")
        return 77, 77


class FakeChild:
    def __init__(self) -> None:
        self.process = Process()
        self.killed = 0

    def workers(self) -> list[Process]:
        return [self.process]

    def kill_tree(self) -> None:
        self.killed += 1


class FakeServer:
    def __init__(self) -> None:
        self.killed: list[float] = []

    def kill(self, down_s: float) -> None:
        self.killed.append(down_s)


class FakeSupervisor:
    def __init__(self, islands: list[Island]) -> None:
        self.islands = islands
        self.draining = False


class Stage:
    """Two islands that have each committed a slot, at 1000 s, with a plan of 60 s."""

    def __init__(self, folder: Path, *faults: Fault, committed: int = 1) -> None:
        self.t = 1000.0
        self.stop = StopRequests()
        self.server = FakeServer()
        self.said: list[str] = []
        self.folder = folder
        self.islands = []
        for number in (0, 1):
            island = Island(number, 1, folder / f"island-{number}")
            island.folder.mkdir()
            island.phase, island.child = Phase.RUNNING, FakeChild()  # type: ignore[assignment]
            island.figures.committed, island.figures.last_inner = committed, self.t
            self.islands.append(island)
        self.supervisor = FakeSupervisor(self.islands)
        self.chaos = Chaos(Plan(faults, 60.0, 0, 1.0), folder, self.stop, now=lambda: self.t)
        self.chaos.begin(self.supervisor, self.server, self.said.append)  # type: ignore[arg-type]

    def at(self, t: float, *trains: int) -> None:
        """Tick at this moment; trains: islands whose last step is of now."""
        self.t = t
        for number in trains:
            self.islands[number].figures.last_inner = t
        self.chaos.tick()

    def child(self, number: int) -> Any:
        return self.islands[number].child

    def kinds(self) -> list[str]:
        return [h.kind for h in self.chaos.done]


def test_the_clock_starts_when_every_island_has_committed_a_slot(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(1.0, "kill", 1, 2.0), committed=0)
    stage.at(1050.0)
    assert stage.chaos.began is None
    stage.islands[0].figures.committed = 1
    stage.at(1051.0)
    assert stage.chaos.began is None
    stage.islands[1].figures.committed = 1
    stage.at(1052.0)
    assert stage.chaos.began == 1052.0 and stage.kinds() == []
    stage.at(1053.0)
    assert stage.kinds() == ["kill"] and stage.child(1).killed == 1 and stage.child(0).killed == 0
    assert stage.islands[1].held_until == 1055.0 and not stage.islands[1].returns


def test_a_walltime_lets_the_island_save_and_come_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(1.0, "walltime", 0, 5.0))
    stage.at(1000.0)
    stage.at(1001.0)
    assert stage.child(0).process.done == ["terminate"]
    assert stage.islands[0].returns and stage.islands[0].held_until == 1006.0


@pytest.mark.parametrize(
    "kind, on, off", [("freeze", "suspend", "resume"), ("disk_full", "limit 0", "limit 77")]
)
def test_what_was_brought_is_lifted(tmp_path: Path, kind: Any, on: str, off: str) -> None:
    stage = Stage(tmp_path, Fault(1.0, kind, 0, 5.0))
    stage.at(1000.0)
    stage.at(1001.0)
    assert stage.child(0).process.done == [on]
    stage.at(1005.9)
    assert stage.child(0).process.done == [on]
    stage.at(1006.0)
    assert stage.child(0).process.done == [on, off]
    lines = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    assert [(line["t"], line.get("over", False)) for line in lines] == [(1001.0, False), (1006.0, True)]


def test_a_nan_is_asked_for_in_the_islands_folder(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(1.0, "nan", 1, 2.0))
    stage.at(1000.0)
    stage.at(1001.0)
    assert (stage.islands[1].folder / INJECT).exists() and not (stage.islands[0].folder / INJECT).exists()


def test_the_place_where_all_meet_is_killed_for_as_long_as_the_plan_says(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(1.0, "meeting", None, 7.0))
    stage.at(1000.0)
    stage.at(1001.0)
    assert stage.server.killed == [7.0]


def test_a_fault_waits_until_its_island_trains_again_after_the_last_one(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, Fault(1.0, "kill", 0, 2.0), Fault(1.5, "freeze", 0, 2.0), Fault(2.0, "kill", 1, 2.0)
    )
    stage.at(1000.0)
    stage.at(1001.0)
    stage.at(1002.5, 1)
    assert stage.kinds() == ["kill", "kill"], "of another island, at once"
    stage.islands[0].phase = Phase.RESTARTING
    stage.at(1004.0)
    stage.islands[0].phase = Phase.RUNNING
    stage.at(1006.0)
    assert stage.kinds() == ["kill", "kill"], "it runs, but has made no step yet"
    stage.at(1008.0, 0)
    assert stage.kinds() == ["kill", "kill", "freeze"] and stage.chaos.left_over == 0


def test_at_its_end_everything_is_lifted_and_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(55.0, "freeze", 0, 20.0), Fault(56.0, "kill", 0, 20.0))
    stage.at(1000.0)
    stage.at(1055.0)
    stage.at(1060.0)
    assert stage.child(0).process.done == ["suspend", "resume"]
    assert stage.stop.count == 1 and stage.chaos.ended == 1060.0
    assert stage.chaos.left_over == 1
    stage.at(1070.0, 0)
    assert stage.kinds() == ["freeze"] and stage.stop.count == 1


def test_an_island_that_is_over_ends_the_plan(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(5.0, "kill", 0, 2.0))
    stage.at(1000.0)
    stage.islands[1].phase = Phase.FAILED
    stage.at(1001.0)
    assert stage.chaos.ended == 1001.0 and stage.stop.count == 1


def test_without_wires_islands_are_told_the_address_itself(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Fault(5.0, "kill", 0, 2.0))
    assert stage.chaos.route(0, "http://127.0.0.1:5", tmp_path) == "http://127.0.0.1:5"
