"""Heals between gateways on real sockets: sources that die in the middle, runs that commit meanwhile."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response

from tests.integration.exchange.test_gloo_transport import (
    SIZE,
    Gateway,
    founded,
    leave,
    merge_with,
    together,
)
from torchtitan_diloco.config.own import LighthouseConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange import chunks, control
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.protocol import Merge
from torchtitan_diloco.outer.merge import Contribution, Merged

CHUNK = 500  # bytes
CHUNKS = 2 * 4 * SIZE // CHUNK  # of a state with its momentum


class Chunks:
    """What every gateway has served, by port; ``die_after`` so many, the one that serves dies."""

    def __init__(self) -> None:
        self.served: Counter[int] = Counter()
        self.asked: Counter[str] = Counter()
        self.die_after = 10**9
        self.dying = threading.Event()

    def serve(self, request: Request, data: torch.Tensor) -> Response:
        port = request.url.port
        assert port is not None
        if self.served[port] >= self.die_after:
            self.dying.set()
            raise ConnectionError("the connection is cut")
        self.served[port] += 1
        self.asked[f"{request.url.path.rsplit('/', 1)[1]} {request.url.query}"] += 1
        return self.original(request, data)

    original = staticmethod(control.chunk_of)


@pytest.fixture
def bulk(monkeypatch: pytest.MonkeyPatch) -> Chunks:
    found = Chunks()
    monkeypatch.setattr(control, "chunk_of", found.serve)
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    monkeypatch.setattr(chunks, "SMALLEST_CHUNK", CHUNK)
    return found


def commit(*gateways: Gateway) -> None:
    """All of them contribute to a slot."""
    for gateway in gateways:
        gateway.offer(1.0 + gateway.island)
    for outcome in together(*(g.settle for g in gateways)):
        assert isinstance(outcome, Outcome)
        assert outcome.status == "committed" and outcome.participants == tuple(g.island for g in gateways)


def assert_same_state(one: Gateway, other: Gateway) -> None:
    assert one.state.describe() == other.state.describe()
    for name, tensor in one.state.tensors().items():
        assert torch.equal(tensor, other.state.tensors()[name])


def test_fr27_when_the_source_dies_halfway_the_rest_comes_from_the_next_one(
    lighthouse: LighthouseConfig, bulk: Chunks
) -> None:
    a, b, c = founded(lighthouse, 3)
    c.crash()
    commit(a, b)
    bulk.die_after = CHUNKS // 2
    joiner = Gateway(lighthouse, 2, value=5.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(joiner.join, 3)
        assert bulk.dying.wait(20)
        before = joiner.state.describe()
        a.crash()
        bulk.die_after = 10**9
        joined = joining.result(timeout=30)
    assert before["fragments"][0]["version"] == 0, "nothing of half a state is used"
    assert [heal.source for heal in joined.heals] == [1]
    assert [heal.bytes for heal in joined.heals] == [2 * 4 * SIZE]
    assert set(bulk.asked.values()) == {1} and len(bulk.asked) == CHUNKS, "no byte comes twice"
    assert sorted(bulk.served.values()) == [CHUNKS // 2, CHUNKS - CHUNKS // 2]
    assert_same_state(joiner, b)
    commit(b, joiner)
    leave(b, joiner)


def test_fr27_without_another_source_the_island_waits_and_keeps_what_it_had(
    lighthouse: LighthouseConfig, bulk: Chunks
) -> None:
    a, c = founded(lighthouse, 2)
    c.crash()
    commit(a)
    bulk.die_after = CHUNKS // 2
    joiner = Gateway(replace(lighthouse, patience_s=6.0), 1, value=5.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(joiner.join, 2)
        assert bulk.dying.wait(20)
        a.crash()
        began = time.monotonic()
        with pytest.raises(Resumable, match=r"no state to be had from island 0|waited 6 s"):
            joining.result(timeout=30)
        assert time.monotonic() - began < 10
    assert joiner.state.describe()["fragments"][0]["version"] == 0
    assert torch.equal(joiner.state.states[0].anchor, torch.full((SIZE,), 5.0))
    joiner.transport.leave("failure")


def test_fr27_a_damaged_chunk_is_asked_for_again(
    lighthouse: LighthouseConfig, bulk: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = founded(lighthouse, 2)
    b.crash()
    commit(a)
    serve, damaged = bulk.serve, []

    def damage(request: Request, data: torch.Tensor) -> Response:
        response = serve(request, data)
        if not damaged and bulk.served[request.url.port or 0] == CHUNKS // 2:
            damaged.append(request.url.query)
            response.headers[chunks.CHECKSUM] = "0" * 16
        return response

    monkeypatch.setattr(control, "chunk_of", damage)
    joiner = Gateway(lighthouse, 1, value=5.0)
    joiner.join(2)
    assert damaged and sorted(bulk.asked.values()) == [1] * (CHUNKS - 1) + [2]
    assert_same_state(joiner, a)
    leave(a, joiner)


@pytest.mark.parametrize("merging", [True, False])
def test_fr28_an_island_that_comes_while_the_others_exchange(
    lighthouse: LighthouseConfig, merging: bool
) -> None:
    """It heals once, offers nothing before, and takes part in the first slot that can still count it."""
    began, go_on = threading.Event(), threading.Event()

    def slow() -> Merge:
        mean = merge_with("tokens")  # one each: its memory is used again at the next merge

        def slowly(fragment: int, contributions: list[Contribution]) -> tuple[Merged, list[float]]:
            began.set()
            assert go_on.wait(30)
            return mean(fragment, contributions)

        return slowly  # type: ignore[return-value]

    go_on.set()
    a, b, lost = gateways = [Gateway(lighthouse, island, merge=slow()) for island in range(3)]
    together(*(partial(gateway.join, 3) for gateway in gateways))
    lost.crash()
    commit(a, b)
    go_on.clear()
    began.clear()
    a.offer(1.0)
    if merging:
        b.offer(1.0)
        assert began.wait(20)
    joiner = Gateway(lighthouse, 2, value=5.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(joiner.join, 3)
        if merging:  # nobody can say yet whether that slot is decided without it
            end = time.monotonic() + 20
            while (
                w := joiner.transport.waiting()
            ) is None or w.why != "a slot began before this island came":
                assert time.monotonic() < end and not joining.done()
                time.sleep(0.02)
            go_on.set()
            assert {o.status for o in together(a.settle, b.settle)} == {"committed"}  # type: ignore[attr-defined]
        joined = joining.result(timeout=30)
    assert len({heal.source for heal in joined.heals}) == 1
    assert joiner.state.slot == a.state.slot == (2 if merging else 1)
    assert_same_state(joiner, a)
    go_on.set()
    if not merging:  # the slot that was open waits for it
        for gateway in (b, joiner):
            gateway.offer(1.0)
        for outcome in together(*(g.settle for g in (a, b, joiner))):
            assert isinstance(outcome, Outcome) and outcome.participants == (0, 1, 2)
    commit(a, b, joiner)
    assert_same_state(joiner, a)
    leave(a, b, joiner)


def test_a_state_that_is_being_read_stays_however_often_the_run_commits(
    lighthouse: LighthouseConfig, bulk: Chunks
) -> None:
    (a,) = founded(lighthouse, 1)
    commit(a)
    assert a.transport._server is not None
    with control.PeerClient(a.transport._server.url, "run", 5.0) as client:
        first = client.state()
        for _ in range(4):
            commit(a)
            into = control.Upload(4 * SIZE)
            client.fetch(first["key"], "anchor.0", into)
            assert into.complete
            client.state()  # somebody else begins
        assert len(a.transport._server._shelf) == control.SHELVED
    leave(a)


def test_a_joiner_starts_at_the_step_that_the_others_have_reached_when_it_is_admitted(
    lighthouse: LighthouseConfig, bulk: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the step of when its state was copied, the others would wait for it at its first slot."""
    # That those who found a run begin at one step, however late they are, the golden comparison tells.
    (a,) = founded(lighthouse, 1)
    commit(a)
    a.transport.progress(40)
    serve = bulk.serve

    def train_on(request: Request, data: torch.Tensor) -> Response:
        a.transport.progress(47)
        return serve(request, data)

    monkeypatch.setattr(control, "chunk_of", train_on)
    joiner = Gateway(lighthouse, 1, value=5.0)
    assert joiner.join(1).step == 47
    leave(a, joiner)
