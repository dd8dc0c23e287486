"""Islands and their hub over a network that loses, cuts, repeats and reorders requests: the run ends as if it did not."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_proxy import FAULTS, Decide, HubProxy, Request, at_random
from torchtitan_diloco.config.own import CodecConfig
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer

ISLANDS, SLOTS, SIZES = 4, 100, (1000, 300)


@contextlib.contextmanager
def a_hub(decide: Decide, folder: Path | None = None, lease_s: float = 30.0) -> Iterator[HubProxy]:
    """A hub behind a proxy. Leases outlast what the proxy does, so that no island is ever missing from a slot."""
    server = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=lease_s), folder)
    thread = server.in_thread()
    try:
        with HubProxy(server.port, decide).running() as proxy:
            yield proxy
    finally:
        server.stop()
        thread.join(10)
    assert not thread.is_alive()


def run_all(url: str, codec: CodecConfig) -> list[HubIsland]:
    islands = [HubIsland(i, [url], ISLANDS, SIZES, codec) for i in range(ISLANDS)]

    def whole_run(island: HubIsland) -> None:
        island.join()
        island.run(SLOTS)
        island.transport.leave("done")

    together([lambda island=island: whole_run(island) for island in islands], 200)
    return islands


@pytest.mark.timeout(240)
@pytest.mark.parametrize("wire, seed", [("fp32", 1), ("int4", 2)])
def test_faults_of_the_network_change_no_bit(wire: str, seed: int) -> None:
    """Of 4 islands and 100 slots: every slot is committed by all of them (or taken from the hub), and once only."""
    codec = CodecConfig(wire=wire)
    with a_hub(lambda request: "") as quiet:
        reference = run_all(quiet.url, codec)[0]
    with a_hub(at_random(seed, 0.01)) as bad:
        islands = run_all(bad.url, codec)
    print(f"seed {seed}:", dict(bad.done))
    assert set(FAULTS) <= set(bad.done)
    for island in islands:
        assert island.state.describe() == reference.state.describe()
        for name, tensor in island.state.tensors().items():
            assert torch.equal(tensor, reference.state.tensors()[name])
        assert {status for _, status in island.statuses} <= {"committed", "behind"}
        for outcome in island.outcomes:
            if outcome.status == "committed":
                assert outcome.participants == (0, 1, 2, 3)
    # Nothing is merged twice: what the islands have sent is what the state counts.
    assert islands[0].state.tokens_total == ISLANDS * SLOTS * 40
    print("healed:", [island.heals for island in islands])


def test_an_island_that_was_given_up_comes_back_though_its_admission_gets_lost() -> None:
    """It was cut off for longer than its lease. It asks again at its own pace, and takes part in the next slot."""
    cut_off, lost, asked = False, 2, list[str]()

    def decide(request: Request) -> str:
        nonlocal lost
        asked.append(request.path)
        if cut_off:
            return "drop before"
        if request.path == "/admit" and len(asked) > before and lost:
            lost -= 1
            return "drop before"
        return ""

    before = 1 << 30
    with a_hub(decide, lease_s=1.0) as proxy:
        direct = f"http://127.0.0.1:{proxy.target}"
        a, b = HubIsland(0, [proxy.url], 2, SIZES), HubIsland(1, [direct], 2, SIZES)
        together([lambda island=island: (island.join(), island.run(1)) for island in (a, b)])
        cut_off = True
        time.sleep(2.0)
        before, cut_off = len(asked), False
        a.offer(1)
        while not any(path.startswith("/slots/1/outcome") for path in asked):  # its header was taken
            assert len(asked) - before < 60
            time.sleep(0.01)
        assert not lost
        b.offer(1)
        for island in (a, b):
            assert island.settle(1, 20).participants == (0, 1)
        assert len(asked) - before < 60
        for island in (a, b):
            island.transport.leave("done")
