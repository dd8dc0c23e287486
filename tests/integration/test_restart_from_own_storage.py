"""FR-42: two clusters without a common file system. Every island saves to its own, and each can start again from it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import event_schema
from tests.helpers.hub_islands import RUN
from tests.helpers.hub_process import HubProcess
from tests.helpers.real_run import HandStarted, offline, traces_of_ours, write_config
from torchtitan_diloco.observe.reading import last_checkpoint

SYNC_EVERY, PACE_S = 5, 0.25


class Cluster:
    """A folder that nobody else sees, and one island that is started in it again and again."""

    def __init__(self, island: int, cwd: Path, corpus: Path, meeting: tuple[str, ...]) -> None:
        self.island, self.cwd = island, cwd
        self._config = write_config(cwd, corpus)
        self._arguments = (
            *("--island.id", str(island), "--training.steps", "10000", *meeting),
            *("--debug.pace_step_seconds", str(PACE_S)),
        )
        self.one: HandStarted | None = None

    @property
    def checkpoints(self) -> Path:
        return self.cwd / "outputs" / RUN / f"island-{self.island}" / "checkpoint"

    def start(self) -> None:
        self.one = HandStarted(self.cwd, self._config, *self._arguments, name=RUN)

    def now(self) -> list[dict[str, Any]]:
        """Events of the latest start."""
        assert self.one is not None
        return self.one.incarnations(self.island)[-1]

    def committed(self) -> list[dict[str, Any]]:
        return [e for e in self.now() if e["event"] == "round" and e["committed"]]

    def starts(self) -> int:
        return len(self.one.incarnations(self.island)) if self.one else 0

    def send(self, number: int) -> None:
        """To all processes of the island, as a batch system does."""
        if self.one is not None and self.one.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.one.process.pid, number)

    def end(self) -> dict[str, Any]:
        """Wait until it has ended; what it says of itself."""
        assert self.one is not None
        self.one.end(60)
        return self.one.state(self.island)

    def stop(self) -> None:
        if self.one is not None:
            self.one.stop()


def until(holds: Callable[[], object], clusters: list[Cluster], within_s: float = 90) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        said = "\n".join(c.one.output[-3000:] for c in clusters if c.one)
        assert all(c.one is not None and c.one.process.poll() is None for c in clusters), said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@contextlib.contextmanager
def lighthouse(folder: Path) -> Iterator[tuple[str, ...]]:
    command = ["lighthouse", "--bind", "127.0.0.1:0", "--port-file", str(folder / "port")]
    server = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_diloco", *command, "--heartbeat-timeout-ms", "3000"],
        cwd=folder,
        env=offline(),
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "port").exists():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield ("--lighthouse.address", f"http://127.0.0.1:{(folder / 'port').read_text().strip()}")
    finally:
        server.kill()
        server.wait()


@dataclass
class Story:
    """What each island says of itself when it has ended (state.json, step of its newest checkpoint), and its events."""

    clusters: list[Cluster]
    stopped_early: list[tuple[dict[str, Any], int | None]]
    continued: list[list[dict[str, Any]]]
    killed_at: int | None
    """Step of the newest checkpoint of the killed island."""
    stopped: tuple[dict[str, Any], int | None]
    """Of the other one, after three more slots."""
    last: list[list[dict[str, Any]]]
    ended: list[tuple[dict[str, Any], int | None]]


@pytest.fixture(scope="module", params=["hub", pytest.param("gloo", marks=pytest.mark.slow)])
def story(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Iterator[Story]:
    """Both are stopped before the first slot; island 0 is killed after slot 3; island 1 goes on by itself for three more;
    all is stopped, the hub as well; all is started again."""
    with contextlib.ExitStack() as stack:
        meeting_place = tmp_path_factory.mktemp("meeting-place")
        hub = None
        if request.param == "hub":
            hub = HubProcess(meeting_place, heartbeat_timeout_s=3.0)
            hub.start()
            stack.callback(hub.kill)
            meeting: tuple[str, ...] = ("--transport.kind", "hub", "--transport.urls", hub.url)
        else:
            meeting = stack.enter_context(lighthouse(meeting_place))
        clusters = [
            Cluster(island, tmp_path_factory.mktemp(f"cluster-{island}"), corpus, meeting)
            for island in (0, 1)
        ]
        for cluster in clusters:
            stack.callback(cluster.stop)
            cluster.start()
        yield _tell(clusters, hub)


def _tell(clusters: list[Cluster], hub: HubProcess | None) -> Story:
    first, second = clusters
    newest = lambda cluster: last_checkpoint(cluster.checkpoints)
    until(lambda: all(c.starts() and any(e["event"] == "inner" for e in c.now()) for c in clusters), clusters)
    for cluster in clusters:
        cluster.send(signal.SIGTERM)
    stopped_early = [(cluster.end(), newest(cluster)) for cluster in clusters]

    for cluster in clusters:
        cluster.start()
    until(lambda: all(c.starts() == 2 and len(c.committed()) >= 3 for c in clusters), clusters)
    first.send(signal.SIGKILL)
    continued = [first.now(), second.now()]
    first.end()
    killed_at = newest(first)
    until(lambda: len(second.committed()) >= 6, [second])
    second.send(signal.SIGTERM)
    stopped = (second.end(), newest(second))
    if hub is not None:
        hub.terminate()
        hub.start()

    for cluster in clusters:
        cluster.start()
    until(lambda: all(c.starts() == 3 and len(c.committed()) >= 2 for c in clusters), clusters)
    for cluster in clusters:
        cluster.send(signal.SIGTERM)
    ended = [(cluster.end(), newest(cluster)) for cluster in clusters]
    last = [cluster.now() for cluster in clusters]
    return Story(clusters, stopped_early, continued, killed_at, stopped, last, ended)


def _first(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(event for event in events if event["event"] == kind)


def test_fr42_a_sigterm_before_the_first_exchange_leaves_a_checkpoint_from_which_each_island_goes_on(
    story: Story,
) -> None:
    # The first to be back goes on from its own checkpoint; the other may find that the run has moved on meanwhile.
    resumed_at = []
    for (state, saved), events in zip(story.stopped_early, story.continued, strict=True):
        assert state["state"] == "resume"
        assert saved is not None and 0 < saved == state["step"] <= SYNC_EVERY
        join = _first(events, "join")["step"]
        assert _first(events, "inner")["step"] == join + 1 > saved
        resumed_at.append(join - saved)
    assert min(resumed_at) == 0


def test_fr42_each_island_starts_again_from_its_own_storage_and_who_is_behind_heals_first(
    story: Story,
) -> None:
    killed, survivor = story.last
    assert story.killed_at is None or story.killed_at < story.stopped[0]["step"]
    version = max(e["version"] for e in story.continued[0] if e["event"] == "round")
    newest = max(e["version"] for e in story.clusters[1].one.incarnations(1)[1] if e["event"] == "round")  # type: ignore[union-attr]
    assert newest >= version + 3
    heal = _first(killed, "heal")
    assert heal["version"] >= newest, "the killed island is told of the newest version, wherever that is"
    kinds = [e["event"] for e in killed if e["event"] in ("start", "heal", "join", "inner")]
    assert kinds[:4] == ["start", "heal", "join", "inner"] and kinds.count("heal") == 1
    assert story.stopped[1] == story.stopped[0]["step"]
    assert [e for e in survivor if e["event"] == "heal"] == []
    assert _first(survivor, "inner")["step"] == story.stopped[0]["step"] + 1
    # A window, and what the survivor had trained towards the slot that was under way when it was stopped.
    assert abs(_first(killed, "inner")["step"] - _first(survivor, "inner")["step"]) < 2 * SYNC_EVERY


def test_fr42_all_anchors_are_equal_and_no_slot_has_two(story: Story) -> None:
    first, second = (cluster.one.digests(cluster.island) for cluster in story.clusters if cluster.one)
    common = first.keys() & second.keys()
    assert len(common) >= 4
    assert {slot: first[slot] for slot in common} == {slot: second[slot] for slot in common}


def test_fr42_no_path_has_two_writers(story: Story) -> None:
    paths: list[set[Path]] = []
    for cluster in story.clusters:
        assert cluster.one is not None
        said = [cluster.cwd / event["path"] for event in cluster.one.events(cluster.island, "checkpoint")]
        assert said and len(said) == len(set(said)), "a checkpoint was written twice"
        assert all(path.is_relative_to(cluster.checkpoints) for path in said)
        assert {path.name for path in cluster.one.path.iterdir() if path.is_dir()} == {
            f"island-{cluster.island}"
        }
        paths.append(set(said))
    assert not paths[0] & paths[1]


def test_fr42_whatever_happens_state_and_events_are_whole_and_no_stack_trace_is_ours(story: Story) -> None:
    for cluster, (state, saved) in zip(story.clusters, story.ended, strict=True):
        assert state["state"] == "resume" and saved == state["step"]
        assert cluster.one is not None
        assert event_schema.problems(cluster.one.events(cluster.island)) == []
        assert event_schema.state_problems(state) == []
        assert traces_of_ours(cluster.one.output) == []
