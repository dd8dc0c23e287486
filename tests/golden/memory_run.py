"""Runs a few islands in this process over the memory transport, with their real methods and real inner training."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.golden.compare import check_run
from tests.golden.island import Case, Island, Plan, paces, slots_of
from tests.golden.reference import Result
from tests.golden.turns import Turns, TurnsTransport
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.memory import MemoryNet, Script
from torchtitan_diloco.outer.merge import Contribution, Merged


def run_memory(
    folder: Path,
    case: Case,
    plans: Sequence[Plan],
    script: Script | None = None,
    wrong_bits: tuple[int, int] | None = None,
) -> list[Island]:
    """Train island i by ``plans[i]`` to the end, below ``folder``. All plans must have the same number of slots.

    wrong_bits: (island, n): that island's nth merge, from 0, comes out with a wrong bit, so that it has to heal.
    """
    turns = Turns(MemoryNet(script))

    def transport(island: int, merge: Merge) -> TurnsTransport:
        if wrong_bits is not None and wrong_bits[0] == island:
            merge = WrongBit(merge, wrong_bits[1])
        return TurnsTransport(merge, turns.net, turns=turns)

    islands = [
        Island(i, plan, case, folder, lambda merge, i=i: transport(i, merge), islands=len(plans))  # type: ignore[misc]
        for i, plan in enumerate(plans)
    ]
    for island in islands:
        island.join()
    turns.net.run(1.0)  # everybody has heard of everybody
    turns.run([island.train for island in islands])
    for island in islands:
        island.finish()
    return islands


class WrongBit:
    """A merge that comes out wrong once, whether the island merges by itself or takes what the owners of slices merged."""

    def __init__(self, merge: Merge, at: int) -> None:
        self._merge = merge
        self._at = at
        self.sizes, self.own = merge.sizes, merge.own

    def __call__(self, fragment: int, contributions: Sequence[Contribution]) -> tuple[Merged, list[float]]:
        merged, shares = self._merge(fragment, contributions)
        return self._spoil(merged), shares

    def decode(self, fragment: int, payload: torch.Tensor) -> Merged:
        return self._spoil(self._merge.decode(fragment, payload))

    def _spoil(self, merged: Merged) -> Merged:
        self._at -= 1
        if self._at != -1:
            return merged
        merged.whole().view(torch.int32)[0] ^= 1
        return Merged.of(merged.delta)


@dataclass(frozen=True)
class MemoryRun:
    """A run and what must come of it: see ``run_memory`` and ``check_run``."""

    case: Case
    plans: Sequence[Plan]
    script: Script | None = None
    failed: tuple[int, ...] = ()
    wrong_bits: tuple[int, int] | None = None
    healed: tuple[tuple[int, int], ...] = ()
    skipped: Mapping[int, Collection[int]] | None = None

    def check(self, folder: Path) -> list[Result]:
        """Do it below ``folder``; raises Mismatch unless it is the reference's, local parameters included."""
        run_memory(folder, self.case, self.plans, self.script, self.wrong_bits)
        return check_run(
            folder,
            range(len(self.plans)),
            self.case.outer(islands=len(self.plans), slots=slots_of(self.case, self.plans[0])),
            paces=paces(self.plans, skipped=self.skipped),
            failed=self.failed,
            healed=self.healed,
        )
