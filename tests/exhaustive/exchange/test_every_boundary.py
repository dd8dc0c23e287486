"""One fault of every kind at every message of a run: headers, bulk and confirmations of slots that overlap."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.exhaustive.exchange.fault_schedules import KINDS, Fault, Schedule
from torchtitan_diloco.exchange.memory import Boundary, Fate
from torchtitan_diloco.exchange.messages import Announce, Confirm

FRAGMENTS = (
    4  # as many as slots in a window, so that an overlap of one slot is one of a quarter of the window
)
SLOTS = 5


def messages(islands: int, overlap: int) -> int:
    """How many messages a run without faults sends: headers, bulk and confirmations of every slot, for certain."""
    simulation = Schedule(islands, SLOTS, FRAGMENTS, overlap).simulation()
    seen: Counter[tuple[object, int]] = Counter()
    script = simulation.script

    def watch(boundary: Boundary) -> Fate:
        seen[type(boundary.message) if boundary.message else "bulk", boundary.slot] += 1
        return script(boundary)

    simulation.script = watch
    simulation.run()
    pairs = islands * (islands - 1)
    assert seen.keys() >= {(what, slot) for what in (Announce, "bulk", Confirm) for slot in range(SLOTS)}
    assert all(seen[what, slot] >= pairs for what in ("bulk", Confirm) for slot in range(SLOTS))
    return seen.total()


def schedules(islands: int, overlap: int, kind: str) -> Iterator[Schedule]:
    for number in range(messages(islands, overlap)):
        yield Schedule(islands, SLOTS, FRAGMENTS, overlap, {number: Fault(kind)}, more=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
@pytest.mark.parametrize("islands", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_fault_at_every_message(islands: int, overlap: int, kind: str) -> None:
    """No two digests for one version, nothing counted twice, and progress within one window after the fault."""
    for schedule in schedules(islands, overlap, kind):
        happened: list[str] = []
        try:
            schedule.run(happened.append)
        except Exception as error:
            raise AssertionError(f"{schedule}.run(): {error}") from error
        assert len(happened) == 1, f"{schedule}: the fault did not happen"
