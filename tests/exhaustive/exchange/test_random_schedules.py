"""The slot protocol under thousands of random schedules of faults; other seeds at every run, printed.

100,000 of them, within the hour on two cores:

    DILOCO_SEED=0 DILOCO_SCHEDULES=100000 python -m pytest -m "not slow" tests/exhaustive/exchange/test_random_schedules.py
"""

import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from tests.exhaustive.exchange.fault_schedules import Schedule, drawn, drawn_with_owners, run_drawn
from tests.exhaustive.exchange.simulation import (
    KINDS,
    between_owners,
    boundaries_between_owners,
    complete,
    single_fault,
)
from tests.helpers.seeds import run_seeds

SCHEDULES = int(os.environ.get("DILOCO_SCHEDULES", "200"))
SEED = int(os.environ.get("DILOCO_SEED", str(random.SystemRandom().randrange(2**31))))


@pytest.mark.timeout(max(300, SCHEDULES // 20))
@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("draw, share", [(drawn, 1), (drawn_with_owners, 10)], ids=["few", "owners"])
def test_random_schedules_of_faults(
    draw: Callable[[int], Schedule], share: int, schedules: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never two digests for one version, no inner step counted twice, progress after the last fault; see ``account``.

    Replay one with DILOCO_SEED=<seed> DILOCO_SCHEDULES=1. A failure comes with the smallest schedule that fails as well.
    share: one in so many of the schedules, since those of more islands take longer.
    """
    schedules = -(-schedules // share)
    with capsys.disabled():
        print(f"\n{schedules} random schedules from DILOCO_SEED={SEED}")
    counts = run_seeds(
        partial(run_drawn, draw=draw),
        range(SEED, SEED + schedules),
        "DILOCO_SEED={seed} DILOCO_SCHEDULES=1",
        seconds=120,
    )
    slots, afterwards = counts["slots"], counts["afterwards"]
    with capsys.disabled():
        print(f"{slots} committed slots; {afterwards} schedules had a window after the last fault")
    assert counts["schedules"] == schedules
    if schedules >= 500:  # the schedules hit what they are meant to hit
        assert afterwards > schedules // 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_at_every_boundary_between_owners(kind: str) -> None:
    """Headers, both stages of the bulk, and confirmations of a slot of five islands."""
    boundaries = boundaries_between_owners()
    stages = [boundary.stage for boundary in boundaries]
    assert stages.count("slices") == stages.count("merged") == 20 and stages.count(None) >= 40
    for boundary in boundaries:
        complete(between_owners(single_fault(boundary.number, kind)))
