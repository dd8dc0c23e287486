"""Links for lock step, over TorchFT: whom they connect, and that no connection is taken for another."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from tests.helpers.replicas import TIMEOUT_S, lighthouse
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig
from torchtitan_diloco.exchange.bulk import serve_store
from torchtitan_diloco.exchange.managed import LateGroup, ManagedLockstep


def together(*calls: Callable[[], object]) -> list[object]:
    """The results, of calls that wait for one another; an exception is a result."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    return results


def open_links(address: str, island: int, ranks: int) -> list[ManagedLockstep]:
    held, store = serve_store("127.0.0.1", 0, timedelta(seconds=TIMEOUT_S))
    return [
        ManagedLockstep(
            rank=rank,
            ranks=ranks,
            store=store,
            host="127.0.0.1",
            listen="127.0.0.1",
            island=IslandConfig(id=island),
            lighthouse=LighthouseConfig(address=address, heartbeat_interval_s=0.1),
            timeout_s=TIMEOUT_S,
            held=held,
        )
        for rank in range(ranks)
    ]


def test_gateways_of_islands_of_different_size_meet_and_learn_each_others_ids():
    """So that they can tell one another what does not fit, before the second rank looks for its counterpart."""
    with lighthouse() as address:
        small, (gateway, second) = open_links(address, 3, 1)[0], open_links(address, 7, 2)
        links = [small, gateway, second]

        def until_both_are_there(link: ManagedLockstep) -> tuple[int, ...]:
            while not (link.ask(0) and len(link.islands) == 2):
                pass
            return link.islands

        # The ranks of an island ask together, and get one answer.
        assert together(*(lambda link=link: until_both_are_there(link) for link in links)) == [(3, 7)] * 3
        assert all(link.is_new for link in links)
        together(small.connect, gateway.connect)
        texts = together(lambda: small.gather(b"of three"), lambda: gateway.gather(b"of seven, longer"))
        assert texts == [[b"of three", b"of seven, longer"]] * 2
        for link in links:
            link.close()


@pytest.fixture
def groups():
    held, store = serve_store("127.0.0.1", 0, timedelta(seconds=TIMEOUT_S))
    pair = [LateGroup(timedelta(seconds=TIMEOUT_S), "127.0.0.1") for _ in range(2)]

    def want(quorum: int, address: str = store) -> None:
        for rank, group in enumerate(pair):
            group.configure(f"{address}/torchft/{quorum}/0", "island_0", rank, 2, quorum, 0, 1, [0, 1])

    yield pair, want
    del held


def total(group: LateGroup) -> float:
    value = torch.ones(1)
    group.allreduce([value], torch.distributed.AllreduceOptions()).wait()
    return float(value)


def test_a_quorum_number_that_comes_again_names_another_connection(groups):
    """A Lighthouse that was started again counts from the beginning, and gloo would read the addresses of the dead."""
    pair, want = groups
    for quorum in (2, 1, 2, 2):
        for group in pair:
            group.hang_up()
        want(quorum)
        assert together(*(group.connect for group in pair)) == [None, None]
        assert together(*(lambda group=group: total(group) for group in pair)) == [2.0, 2.0]


def test_the_same_quorum_keeps_its_connection_wherever_its_store_is_said_to_be(groups):
    pair, want = groups
    want(1)
    together(*(group.connect for group in pair))
    want(1, "127.0.0.1:9")
    assert all(group.connected for group in pair)
    want(2)
    assert not any(group.connected for group in pair)


def test_a_new_connection_is_made_at_the_store_that_the_last_quorum_names(groups):
    """After a new Lighthouse, another island may be furthest, in a quorum of the same number and members as before.

    Whoever has known that number then meets at the same store as whoever has not.
    """
    (first, second), want = groups
    held, elsewhere = serve_store("127.0.0.1", 0, timedelta(seconds=TIMEOUT_S))
    want(2)
    together(first.connect, second.connect)
    first.hang_up()
    second.configure("127.0.0.1:9/torchft/1/0", "island_0", 0, 1, 1, 0, 1, [1])
    want(2, elsewhere)
    assert together(first.connect, second.connect) == [None, None]
    assert together(lambda: total(first), lambda: total(second)) == [2.0, 2.0]
    del held
