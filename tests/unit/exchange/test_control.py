"""The states that an island offers to those who heal: the last, and one that somebody is reading."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response

from torchtitan_diloco.exchange import chunks, control
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.control import ControlServer, PeerClient
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState

SIZE = 500_000


class Exchange:
    """Answers what it is asked as soon as it is told the answer."""

    def __init__(self) -> None:
        self.asked: list[Member] = []
        self.answer: Future[int] = Future()

    def first_with(self, member: Member) -> Future[int]:
        self.asked.append(member)
        return self.answer


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def server(exchange: Exchange) -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", 0, "run", {}, lambda sender, message: None, exchange.first_with)
    yield server
    server.close()


@pytest.fixture
def state() -> OuterState:
    fragments = whole_model([TensorSpec("w", (SIZE,), torch.float32)])
    return OuterState.found(fragments, OuterSGD(0.7, 0.9, True), [torch.zeros(SIZE)])


def commit(state: OuterState) -> None:
    state.commit(state.slot, 0, state.outer_step(0, 0)(Merged.of(torch.ones(SIZE))), [0], 10, {}, {})


def test_a_state_that_nobody_reads_goes_with_the_next(server, state):
    server.publish(state)
    old = weakref.ref(state.states[0].anchor)
    commit(state)
    server.publish(state)
    gc.collect()
    assert old() is None


def fetch(client: PeerClient, key: str, name: str, into: Upload | None = None) -> torch.Tensor:
    into = into or Upload(4 * SIZE)
    client.fetch(key, name, into)
    assert into.complete
    return into.data.view(torch.float32)


def test_whoever_reads_a_state_can_finish_it_however_often_the_run_commits(server, state, monkeypatch):
    commit(state)
    server.publish(state)
    with PeerClient(server.url, "run", 10.0) as client:
        offered = client.state()
        anchor, momentum = state.states[0].anchor, state.states[0].momentum
        for name, wanted in (("anchor.0", anchor), ("momentum.0", momentum), ("anchor.0", anchor)):
            commit(state)
            server.publish(state)
            assert torch.equal(fetch(client, offered["key"], name), wanted)
            assert torch.equal(fetch(client, client.state()["key"], "anchor.0"), state.states[0].anchor)
        monkeypatch.setattr(control, "PEER_TIMEOUT_S", 0.0)  # nobody has read anything for longer than that
        commit(state)
        server.publish(state)
        with pytest.raises(Unreachable, match="410"):
            fetch(client, offered["key"], "anchor.0")


def test_what_has_come_of_a_tensor_that_is_cut_off_is_not_fetched_again(server, state, monkeypatch):
    commit(state)
    server.publish(state)
    monkeypatch.setattr(chunks, "CHUNK", 400_000)
    monkeypatch.setattr(chunks, "SMALLEST_CHUNK", 400_000)
    served, whole = [], control.chunk_of

    def cut(request: Request, data: torch.Tensor) -> Response:
        served.append(request.url.query)
        if len(served) == 3:
            raise ConnectionError("cut")
        return whole(request, data)

    monkeypatch.setattr(control, "chunk_of", cut)
    monkeypatch.setattr(control, "STREAMS", 1)
    into = Upload(4 * SIZE)
    with PeerClient(server.url, "run", 10.0) as client:
        anchor = fetch(client, client.state()["key"], "anchor.0", into)
    assert torch.equal(anchor, state.states[0].anchor)
    assert len(served) == 6 and len(set(served)) == 5


def test_an_exchange_that_is_busy_says_so_and_one_that_is_not_names_the_first_slot_for_a_member(
    server: ControlServer, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "BUSY_S", 0.05)
    me = Member(7, "second start")
    with PeerClient(server.url, "run", 5.0) as client:
        assert client.first_with(me) is None
        exchange.answer = Future()
        exchange.answer.set_result(12)
        assert client.first_with(me) == 12
    assert exchange.asked == [me, me]
