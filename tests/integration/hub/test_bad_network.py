"""Islands and their hub over a network that loses, cuts, repeats and reorders requests: the run ends as if it did not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_proxy import FAULTS, Decide, HubProxy, at_random
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
