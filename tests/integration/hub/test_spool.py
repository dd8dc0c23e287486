"""A run of which one island only exchanges files: it ends where one over HTTP does, whatever the mirror and the hub do."""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.spool_mirror import Mirror, files
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.exchange.spool import SpoolTransport
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer

pytestmark = pytest.mark.timeout(180)

SIZES = (1000, 3000)
SLOTS = 10


class Quick(SpoolTransport):
    notes_s = 0.5


class Run:
    """A hub, a mirrored spool, and islands of which the last is behind the spool."""

    def __init__(self, folder: Path, rules: Rules | None = None) -> None:
        self.folder, self.rules = folder, rules or Rules(lease_s=3)
        self.port = 0
        self.start_hub()
        self.mirror = Mirror(folder / "hub", folder / "site")
        self.islands = [self.http(i) for i in range(2)] + [self.behind_spool()]

    def start_hub(self) -> None:
        self.server = HubServer(
            "127.0.0.1",
            self.port,
            RUN,
            self.rules,
            self.folder / "state",
            spools=[self.folder / "hub"],
            spool_timeout_s=3600.0,
        )
        self.port = self.server.port
        self._thread = self.server.in_thread()

    def stop_hub(self) -> None:
        self.server.stop()
        self._thread.join()

    def http(self, island: int) -> HubIsland:
        return HubIsland(island, [f"http://127.0.0.1:{self.port}"], sizes=SIZES, islands=3)

    def behind_spool(self, incarnation: str = "a", started: float = 0.0) -> HubIsland:
        return HubIsland(
            2, [], sizes=SIZES, islands=3, incarnation=incarnation, started=started,
            transport_config=TransportConfig(kind="spool", dir=str(self.folder / "site")), transport_class=Quick,
        )  # fmt: skip

    def __enter__(self) -> "Run":
        self.mirror.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for island in self.islands:
            island.transport.leave("done")
        self.stop_hub()
        self.mirror.__exit__()


def whole(island: HubIsland, slots: int = SLOTS):
    return lambda: (island.join(), island.run(slots))


def paced(island: HubIsland, slots: int):
    """As islands that also train: without it, they would be at the end before files can come and go."""

    def run() -> None:
        island.join()
        while island.state.slot < slots:
            island.run(island.state.slot + 1)
            time.sleep(0.4)

    return run


def lineages(islands: list[HubIsland]) -> set[str]:
    return {island.state.lineage for island in islands}


def kill(island: HubIsland) -> None:
    """Nothing more is heard of it."""
    island.transport._left.set()


@pytest.fixture(scope="module")
def over_http(tmp_path_factory) -> str:
    """The lineage of the same run with nothing but HTTP."""
    server = HubServer("127.0.0.1", 0, RUN, Rules(), tmp_path_factory.mktemp("hub"))
    thread = server.in_thread()
    islands = [HubIsland(i, [f"http://127.0.0.1:{server.port}"], sizes=SIZES, islands=3) for i in range(3)]
    together([whole(island) for island in islands])
    for island in islands:
        island.transport.leave("done")
    server.stop()
    thread.join()
    (lineage,) = lineages(islands)
    return lineage


def test_an_island_behind_a_spool_holds_the_same_anchors_as_islands_over_http(tmp_path, over_http):
    with Run(tmp_path) as run:
        together([whole(island) for island in run.islands])
        assert lineages(run.islands) == {over_http}
        for island in run.islands:
            assert [status for _, status in island.statuses] == SLOTS * ["committed"]
        assert all(outcome.participants == (0, 1, 2) for outcome in run.islands[2].outcomes)
        sent = run.islands[2].outcomes[0]
        assert sent.bytes_sent == sent.bytes_received == 4 * SIZES[0]
        for island in run.islands:
            island.transport.leave("done")
        deadline = time.monotonic() + 20
        left = kinds(tmp_path)
        while not left <= {"note", "leave"} and time.monotonic() < deadline:
            time.sleep(0.1)
            left = kinds(tmp_path)
        assert left <= {"note", "leave"}  # everything else was collected


def kinds(folder: Path) -> set[str]:
    """Of all messages in the two copies of the spool."""
    return {Path(name).name.split(".")[0] for name in files(folder / "hub") | files(folder / "site")}


def test_files_that_come_damaged_are_set_aside_and_come_again(tmp_path, over_http):
    class Bad(Mirror):
        def copy(self, source: Path, target: Path) -> None:
            before = files(target)
            super().copy(source, target)
            for name in sorted(files(target) - before):
                if self._random.random() < 0.3:
                    data = bytearray((target / name).read_bytes())
                    kind = self._random.randrange(3)
                    if kind == 0 and data:
                        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                    damaged = (
                        bytes(data) if kind == 0 else bytes(data[: len(data) // 2]) if kind == 1 else b""
                    )
                    (target / name).write_bytes(damaged)

    run = Run(tmp_path)
    run.mirror = Bad(tmp_path / "hub", tmp_path / "site", 0.2, seed=3)
    with run:
        together([whole(island) for island in run.islands])
        assert lineages(run.islands) == {over_http}
    assert list((tmp_path / "hub" / "refused").glob("*.why"))
    assert list((tmp_path / "site" / "refused").glob("*.why"))


def test_a_restarted_island_takes_the_seat_of_its_predecessor_at_once(tmp_path):
    with Run(tmp_path) as run:

        def killed_and_started_anew() -> None:
            first = run.islands[2]
            first.join()
            first.run(4)
            first.offer(4)
            time.sleep(random.random())
            kill(first)
            run.islands[2] = run.behind_spool("b", 1.0)
            paced(run.islands[2], slots)()

        slots = 16
        together([paced(run.islands[0], slots), paced(run.islands[1], slots), killed_and_started_anew])
        assert len(lineages(run.islands)) == 1
        assert run.islands[2].heals >= 1
        assert run.islands[2].outcomes[-1].participants == (0, 1, 2)


def test_the_hub_is_started_anew_in_the_middle(tmp_path):
    with Run(tmp_path) as run:

        def restart() -> None:
            while run.islands[0].state.slot < 4:
                time.sleep(0.05)
            run.stop_hub()
            time.sleep(1.0)
            run.start_hub()

        together([*(paced(island, 16) for island in run.islands), restart])
        assert len(lineages(run.islands)) == 1
        assert run.islands[2].outcomes[-1].participants == (0, 1, 2)


def test_a_site_out_of_reach_holds_up_the_others_once_and_comes_back(tmp_path):
    with Run(tmp_path, Rules(lease_s=3, wait_s=2.0)) as run:
        reached = threading.Event()

        def far(island: HubIsland) -> None:
            island.join()
            island.run(3)
            run.mirror.down = True
            island.run(3 + 1)
            assert reached.is_set()
            island.run(SLOTS + 8)

        def near(island: HubIsland) -> None:
            island.join()
            island.run(3)
            began = time.monotonic()
            island.run(SLOTS)
            # One slot waited for the site, the others did not.
            assert time.monotonic() - began < 3 * run.rules.wait_s
            reached.set()
            run.mirror.down = False
            while 2 not in island.outcomes[-1].participants:
                island.run(island.state.slot + 1)
                time.sleep(0.3)
            island.run(SLOTS + 8)

        together([lambda: near(run.islands[0]), lambda: near(run.islands[1]), lambda: far(run.islands[2])])
        assert len(lineages(run.islands)) == 1
        assert run.islands[2].heals >= 1


def test_a_joiner_gets_the_state_with_the_answer_to_its_hello(tmp_path):
    with Run(tmp_path) as run:
        together([whole(island, 2) for island in run.islands])
        kill(run.islands[2])
        shutil.rmtree(tmp_path / "site")
        run.islands[2] = run.behind_spool("b", 1.0)
        joined = run.islands[2].join()
        assert [heal.bytes for heal in joined.heals] == [2 * 4 * sum(SIZES)]
        assert lineages(run.islands[2:]) == lineages(run.islands[:1])
        asked = {Path(name).name.split(".")[0] for name in files(tmp_path / "site" / "up")}
        assert "state" not in asked


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed (.ci/run installs it)")
def test_the_mirror_script_carries_a_run(tmp_path):
    run = Run(tmp_path)
    script = Path(__file__).parents[3] / "scripts" / "spool_mirror.sh"
    mirror = subprocess.Popen(
        ["bash", script, "--every", "0.3", "--retries", "1", tmp_path / "site", tmp_path / "hub"],
        start_new_session=True,
    )
    try:
        together([whole(island, 4) for island in run.islands])
        assert len(lineages(run.islands)) == 1
        assert all(outcome.participants == (0, 1, 2) for outcome in run.islands[2].outcomes)
        for island in run.islands:
            island.transport.leave("done")
    finally:
        os.killpg(mirror.pid, signal.SIGTERM)
        mirror.wait()
        run.stop_hub()
