"""A joiner and what may happen to it and to the hub while it takes the run's state."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_proxy import HubProxy, Request
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.exchange import chunks
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.slot import Job

SIZES = (200_000, 150_000)
CHUNK = 64 << 10
SLOTS = 6
STATE_BYTES = 2 * 4 * sum(SIZES)  # anchor and momentum


class Bench:
    """A hub, two islands and a joiner, each side behind a proxy: of a joiner every request is seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks: Counter[str] = Counter()  # of the state, by what was asked for
        self.messages: list[str] = []
        self.cut_after = -1  # chunks
        self.on_cut = lambda: None
        self.proxy, self.quiet = HubProxy(0, self._decide), HubProxy(0, lambda request: "")
        self.founders: list[HubIsland] = []

    def start(self) -> None:
        self.server = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=20.0), self.folder)
        self.thread = self.server.in_thread()
        self.proxy.target = self.quiet.target = self.server.port

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(20)

    def _decide(self, request: Request) -> str:
        self.messages.append(f"{request.method} {request.path.partition('?')[0]}")
        if request.method == "GET" and request.path.startswith("/state/"):
            if sum(self.chunks.values()) == self.cut_after:
                self.on_cut()
                self.cut_after = -1
                return "cut answer"
            self.chunks[request.path.split("/", 3)[3]] += 1
        return ""

    def joiner(self) -> HubIsland:
        transport = TransportConfig(kind="hub", urls=[self.proxy.url], streams=1)
        return HubIsland(2, [], 2, SIZES, transport_config=transport)

    def found(self) -> None:
        self.start()
        self.founders = [HubIsland(i, [self.quiet.url], 2, SIZES) for i in range(2)]
        together([lambda i=i: (i.join(), i.run(SLOTS)) for i in self.founders])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    monkeypatch.setattr(chunks, "SMALLEST_CHUNK", CHUNK)
    bench = Bench(tmp_path)
    with bench.proxy.running(), bench.quiet.running():
        bench.found()
        yield bench
        for island in bench.founders:
            island.transport.leave("done")
    bench.stop()


def assert_same_state(one: HubIsland, other: HubIsland) -> None:
    assert one.state.describe() == other.state.describe()
    for name, tensor in one.state.tensors().items():
        assert torch.equal(tensor, other.state.tensors()[name])


def test_fr27_a_heal_that_breaks_off_goes_on_where_it_was(bench: Bench) -> None:
    """After half of the state the connection is cut: what had come is not fetched again, and nothing of it is used before."""
    joiner, held = bench.joiner(), []
    bench.cut_after = STATE_BYTES // CHUNK // 2
    bench.on_cut = lambda: held.append(joiner.state.describe())
    joined = joiner.join()
    assert held[0]["slot"] == 0 and all(entry["version"] == 0 for entry in held[0]["fragments"])
    assert [heal.bytes for heal in joined.heals] == [STATE_BYTES]
    assert set(bench.chunks.values()) == {1}, "each chunk is fetched once"
    assert_same_state(joiner, bench.founders[0])
    joiner.transport.leave("done")


def test_fr27_the_hub_dies_in_the_middle_of_a_heal(bench: Bench) -> None:
    """It comes back after a while: the joiner waits, says for whom, takes the rest and joins with the run's state."""
    joiner, gone = bench.joiner(), threading.Event()

    def die() -> None:
        bench.proxy.target = 1  # nobody listens there
        gone.set()

    bench.cut_after, bench.on_cut = STATE_BYTES // CHUNK // 2, die
    healing = threading.Thread(target=joiner.join, daemon=True)
    healing.start()
    assert gone.wait(30)
    bench.stop()
    end = time.monotonic() + 10
    while not (waiting := joiner.transport.waiting()) or waiting.why.startswith("its state"):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert joiner.state.describe()["slot"] == 0
    before = sum(bench.chunks.values())
    bench.start()
    healing.join(60)
    assert not healing.is_alive()
    assert_same_state(joiner, bench.founders[0])
    whole = sum(-(-4 * size // CHUNK) for size in SIZES) * 2
    # Both connections may have asked twice for a chunk before the hub was back.
    assert sum(bench.chunks.values()) <= whole + 4 and before >= whole // 2 - 1
    joiner.transport.leave("done")


@pytest.mark.parametrize("merging", [True, False])
def test_fr28_a_joiner_comes_while_the_others_exchange(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, merging: bool
) -> None:
    """It heals once, offers nothing before, and takes part in the very next slot."""
    joiner = bench.joiner()
    a, b = bench.founders
    a.offer(SLOTS)
    time.sleep(0.3)  # the slot is open and waits for the other
    hold, merge, began = threading.Event(), Job.run, threading.Event()

    def slowly(job: Job) -> None:
        began.set()
        hold.wait(20)
        merge(job)

    monkeypatch.setattr(Job, "run", slowly)
    if merging:
        b.offer(SLOTS)
        assert began.wait(10)
    joined: list[object] = []
    healing = threading.Thread(target=lambda: joined.append(joiner.join()), daemon=True)
    healing.start()
    time.sleep(1.5)
    assert not joined, "it waits until the slot that began without it is over"
    assert not any("header" in message for message in bench.messages)
    waiting = joiner.transport.waiting()
    assert waiting is not None and waiting.why
    hold.set()
    if not merging:
        b.offer(SLOTS)
    for island in (a, b):
        assert island.settle(SLOTS).status == "committed"
    healing.join(30)
    assert len(joined) == 1 and joiner.heals == 1
    assert_same_state(joiner, a)
    together([lambda i=i: i.run(SLOTS + 3) for i in (a, b, joiner)])
    assert joiner.heals == 1 and {status for _, status in joiner.statuses} == {"committed"}
    assert all(outcome.participants == (0, 1, 2) for outcome in joiner.outcomes)
    assert_same_state(joiner, a)
    joiner.transport.leave("done")
