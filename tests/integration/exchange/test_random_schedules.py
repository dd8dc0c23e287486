"""The slot protocol under thousands of random schedules of faults; another seed at every run, printed."""

import os
import random
from collections.abc import Callable

import pytest

from tests.unit.exchange.simulation import (
    KINDS,
    Simulation,
    between_owners,
    boundaries_between_owners,
    complete,
    random_large_simulation,
    random_simulation,
    single_fault,
)

SCHEDULES = int(os.environ.get("DILOCO_SCHEDULES", "5000"))
SEED = int(os.environ.get("DILOCO_SEED", str(random.SystemRandom().randrange(2**31))))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "simulation, share",
    [pytest.param(random_simulation, 1, id="few"), pytest.param(random_large_simulation, 10, id="owners")],
)
def test_random_schedules_of_faults(
    simulation: Callable[[int], Simulation], share: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never two digests for one version, and progress to the end. Replay one with DILOCO_SEED=<seed> DILOCO_SCHEDULES=1.

    share: of the schedules, one in so many, since larger runs take longer.
    """
    count = -(-SCHEDULES // share)
    with capsys.disabled():
        print(f"\n{count} random schedules from DILOCO_SEED={SEED}")
    for seed in range(SEED, SEED + count):
        try:
            complete(simulation(seed))
        except AssertionError as error:
            raise AssertionError(f"DILOCO_SEED={seed} DILOCO_SCHEDULES=1: {error}") from error


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_at_every_boundary_between_owners(kind: str) -> None:
    """Headers, both stages of the bulk, and confirmations of a slot of five islands."""
    boundaries = boundaries_between_owners()
    stages = [boundary.stage for boundary in boundaries]
    assert stages.count("slices") == stages.count("merged") == 20 and stages.count(None) >= 40
    for boundary in boundaries:
        complete(between_owners(single_fault(boundary.number, kind)))
