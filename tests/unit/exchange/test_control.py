"""The states that an island offers to those who heal: the last, and one that somebody is reading."""

import gc
import weakref
from collections.abc import Iterator

import httpx
import pytest
import torch

from torchtitan_diloco.exchange.control import ControlServer, PeerClient
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.state import OuterState

SIZE = 500_000


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", 0, "run", {}, lambda sender, message: None)
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


def test_whoever_reads_a_state_can_finish_it_while_the_next_is_there(server, state):
    commit(state)
    server.publish(state)
    with PeerClient(server.url, "run", 10.0) as client:
        offered = client.state()
        anchor, momentum = state.states[0].anchor, state.states[0].momentum
        commit(state)
        server.publish(state)
        for name, wanted in (("anchor.0", anchor), ("momentum.0", momentum)):
            got, size = client.tensor(offered["key"], name)
            assert torch.equal(got, wanted) and size > 4 * SIZE
        commit(state)
        server.publish(state)  # there is room for two
        with pytest.raises(httpx.HTTPStatusError, match="410"):
            client.tensor(offered["key"], "anchor.0")


def test_a_tensor_that_is_cut_off_is_no_tensor(server, state, monkeypatch):
    from torchtitan_diloco.outer import stream

    server.publish(state)
    whole = stream.write
    monkeypatch.setattr(stream, "write", lambda *what: list(whole(*what))[:-1])
    with PeerClient(server.url, "run", 10.0) as client:
        key = client.state()["key"]
        with pytest.raises((httpx.HTTPError, ValueError)):
            client.tensor(key, "anchor.0")
