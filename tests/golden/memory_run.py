"""Runs a few islands in this process over the memory transport, with their real methods and real inner training."""

from collections.abc import Sequence
from pathlib import Path

from tests.golden.island import Case, Island, Plan
from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport, Script

PATIENCE_S = 120.0  # of virtual time, for one slot


def run_memory(folder: Path, case: Case, plans: Sequence[Plan], script: Script | None = None) -> list[Island]:
    """Train island i by ``plans[i]`` to the end, below ``folder``. All plans must have the same number of slots."""
    net = MemoryNet(script)
    islands = [
        Island(i, plan, case, folder, lambda merge: MemoryTransport(merge, net), islands=len(plans))
        for i, plan in enumerate(plans)
    ]
    for island in islands:
        island.step = island.method.join(0)
    net.run(1.0)  # everybody has heard of everybody
    while any(island.step < island.plan.steps for island in islands):
        for island in islands:
            island.train_to_send()
        settle_all(net, islands)
    for island in islands:
        island.finish()
    return islands


def settle_all(net: MemoryNet, islands: Sequence[Island]) -> None:
    """Let virtual time pass until every island knows how its open slot ended, and act on it."""
    open_islands = list(islands)
    end = net.now + PATIENCE_S
    while open_islands:
        assert net.now < end, "the slot did not end"
        for island in list(open_islands):
            outcome = island.method.poll(0.05)
            if outcome is not None:
                island.settle(outcome)
                open_islands.remove(island)
