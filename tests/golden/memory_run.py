"""Runs a few islands in this process over the memory transport, with their real methods and real inner training."""

from collections.abc import Sequence
from pathlib import Path

from tests.golden.island import Case, Island, Plan
from tests.golden.turns import Turns, TurnsTransport
from torchtitan_diloco.exchange.memory import MemoryNet, Script


def run_memory(folder: Path, case: Case, plans: Sequence[Plan], script: Script | None = None) -> list[Island]:
    """Train island i by ``plans[i]`` to the end, below ``folder``. All plans must have the same number of slots."""
    turns = Turns(MemoryNet(script))
    islands = [
        Island(
            i,
            plan,
            case,
            folder,
            lambda merge: TurnsTransport(merge, turns.net, turns=turns),
            islands=len(plans),
        )
        for i, plan in enumerate(plans)
    ]
    for island in islands:
        island.join()
    turns.net.run(1.0)  # everybody has heard of everybody
    turns.run([island.train for island in islands])
    for island in islands:
        island.finish()
    return islands
