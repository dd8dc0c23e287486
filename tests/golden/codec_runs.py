"""Runs in which deltas travel encoded, over the memory transport, and what must come of them."""

from tests.golden.island import Case, Plan
from tests.golden.memory_run import MemoryRun
from torchtitan_diloco.exchange.memory import Boundary, Fate

PLANS = [Plan(8, 17), Plan(10, 21, rows=3), Plan(9, 19, rows=1)]
SHORT = [Plan(2, 5), Plan(3, 7, rows=3), Plan(2, 5, rows=1)]
EVEN = [Plan(8, 17), Plan(8, 17, rows=3), Plan(8, 17, rows=1)]
LONG = [Plan(8, 25), Plan(8, 25, rows=3), Plan(8, 25, rows=1)]
WIDE = [Plan(4, 9, width=40), Plan(5, 11, rows=3, width=40), Plan(4, 9, rows=1, width=40)]
"""Two chunks of topk, in one fragment."""


def lose(*slots: int) -> dict:
    """As arguments of MemoryRun: these slots lose their bulk in all tries."""

    def script(boundary: Boundary) -> Fate:
        return Fate(delays=()) if boundary.kind == "bulk" and boundary.slot in slots else Fate()

    return {"script": script, "failed": slots}


def with_failures(case: Case) -> MemoryRun:
    """Fragment 1 fails in its second slot and commits in its third and last; fragment 2 commits, fails and commits."""
    return MemoryRun(case, LONG, **lose(5, 6))


def with_a_heal(case: Case) -> MemoryRun:
    """Island 1 gets a wrong bit in slot 5, after step 12; it takes the state of another, which has made step 13 by then."""
    assert case.fragments == 4 and case.overlap == 0
    return MemoryRun(case, LONG, wrong_bits=(1, 5), healed=((1, 5),), skipped={1: [13]})


def with_a_listener(case: Case) -> MemoryRun:
    """In slot 11, the last of fragment 3, only island 1 has made a step; what the others would send counts for nothing."""
    assert case.fragments == 4 and case.overlap == 1
    return MemoryRun(case, [Plan(8, 17), Plan(10, 22, rows=3), Plan(9, 19, rows=1)])
