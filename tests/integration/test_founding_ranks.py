"""FR-06 with real ranks: two islands of two ranks each, sharded by FSDP over gloo, found a run from unequal states."""

import json
from pathlib import Path

import pytest

from tests.golden.gloo_run import run_gloo
from tests.golden.island import Case, Plan
from tests.helpers.founding_worker import Founding

PLAN = Plan(4, 4000)
LATE_S = 0.7


def founding(name: str, values: tuple[float, float], slots: tuple[int, int], late: int) -> Founding:
    delays = (LATE_S, 0.0) if late == 0 else (0.0, LATE_S)
    return Founding(name, Case(), [PLAN, PLAN], [[0, 1], [2, 3]], values=values, slots=slots, delays=delays)


RUNS = {
    run.name: run
    for run in [
        founding("A-is-0-and-first", (1.0, 2.0), (125, 0), late=1),
        founding("A-is-0-and-second", (1.0, 2.0), (125, 0), late=0),
        founding("A-is-1-and-first", (2.0, 1.0), (0, 125), late=0),
        founding("A-is-1-and-second", (2.0, 1.0), (0, 125), late=1),
        founding("500-against-900", (5.0, 9.0), (125, 225), late=1),
    ]
}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("founding")
    run_gloo(folder, list(RUNS.values()), timeout_s=120, worker="tests.helpers.founding_worker")
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_fr_06_every_shard_of_both_islands_is_the_further_one_s(name: str, held: Path) -> None:
    """A mix would show as two values of one parameter, shards of two sources as different ranks."""
    run = RUNS[name]
    slots = max(run.slots)
    value = run.values[run.slots.index(slots)]
    for process in range(4):
        found = json.loads((held / f"{name}-{process}.json").read_text())
        assert found["step"] == slots * PLAN.sync_every
        assert len(found["held"]) > 4
        assert {tuple(values) for values in found["held"].values()} == {(value,)}
