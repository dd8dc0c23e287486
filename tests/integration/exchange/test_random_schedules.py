"""The slot protocol under thousands of random schedules of faults; another seed at every run, printed."""

import os
import random

import pytest

from tests.unit.exchange.simulation import random_simulation

SCHEDULES = int(os.environ.get("DILOCO_SCHEDULES", "5000"))
SEED = int(os.environ.get("DILOCO_SEED", str(random.SystemRandom().randrange(2**31))))


@pytest.mark.timeout(300)
def test_random_schedules_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """Never two digests for one version, and progress to the end. Replay one with DILOCO_SEED=<seed> DILOCO_SCHEDULES=1."""
    with capsys.disabled():
        print(f"\n{SCHEDULES} random schedules from DILOCO_SEED={SEED}")
    for seed in range(SEED, SEED + SCHEDULES):
        try:
            simulation = random_simulation(seed)
            simulation.run()
            assert simulation.finished() or not simulation.net.nodes, "an island has not finished"
        except AssertionError as error:
            raise AssertionError(f"DILOCO_SEED={seed} DILOCO_SCHEDULES=1: {error}") from error
