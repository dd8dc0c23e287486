"""Every sample is accounted for, whatever islands do: the audit against an independent account of ids."""

import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.exhaustive.exchange.simulation import random_script
from tests.helpers.schedules import Schedule, source
from tests.helpers.seeds import run_seeds
from torchtitan_diloco.data.streams import Source

SCHEDULES = int(os.environ.get("DILOCO_DATA_SCHEDULES", "200"))
SEED = int(os.environ.get("DILOCO_SEED", str(random.SystemRandom().randrange(2**31))))


def holdings_of(rng: random.Random, islands: int) -> list[list[Source]]:
    """All the same, or some islands without a source or with a part of it."""
    shards = rng.choice([1, 3, 8, 11])
    big, small = rng.randrange(6, 40), rng.randrange(4, 12)
    whole = [source("a", big, shards), source("b", small, shards, weight=0.3)]
    if rng.random() < 0.6:
        return [whole for _ in range(islands)]
    parts = [
        whole,
        [source("a", big, shards, present="0")],
        [source("b", small, shards, weight=2.0)],
        [source("a", big, shards, present=f"0-{shards - 1}")],
    ]
    return [whole if rng.random() < 0.5 else rng.choice(parts) for _ in range(islands)]


def one(folder: Path, seed: int):
    rng = random.Random(seed)
    islands = 1 + seed % 5
    script = random_script(seed, faults=rng.randrange(0, 6), boundaries=60 * islands)
    schedule = Schedule(folder, holdings_of(rng, islands), seed, script, slots=rng.randrange(3, 9))
    schedule.run()
    schedule.close()
    return schedule, schedule.check()


def counted(folder: Path, seed: int) -> Counter[str]:
    own = folder / str(seed)
    schedule, report = one(own, seed)
    shutil.rmtree(own)
    return Counter(
        second=any(row.epoch >= 1 and row.consumed for row in report.epochs),
        lost=sum(row.lost for row in report.epochs) > 0,
        slots=len(schedule.truth.slots),
        guests=any(actor.method.data.guest for actor in schedule.every),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(5000, marks=pytest.mark.slow)])
def test_the_audit_equals_an_independent_account_of_ids(
    schedules: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000: DILOCO_DATA_SCHEDULES=10000 and -m "not slow". Replay one with DILOCO_SEED=<seed> DILOCO_DATA_SCHEDULES=1."""
    with capsys.disabled():
        print(f"\n{schedules} random schedules from DILOCO_SEED={SEED}")
    replay = "DILOCO_SEED={seed} DILOCO_DATA_SCHEDULES=1"
    counts = run_seeds(partial(counted, tmp_path), range(SEED, SEED + schedules), replay)
    second, lost = counts["second"], counts["lost"]
    with capsys.disabled():
        print(f"{counts['slots']} committed slots; {second} schedules reached the second epoch, {lost} lost samples, "
              f"{counts['guests']} had a guest at the end")  # fmt: skip
    if schedules >= 500:  # the schedules hit what they are meant to hit
        assert second > schedules // 5 and lost > schedules // 20


def test_an_island_that_committed_a_slot_alone_has_another_history_than_those_who_did_so_without_it(
    tmp_path: Path,
) -> None:
    """Of two islands the one whose delta is not finite commits and is lost; the other commits the same anchor by itself.

    Only the first has passed its samples over. The only such schedule in some 60,000.
    """
    schedule, report = one(tmp_path, 809304871)
    assert len(schedule.truth.slots) == 6 and sum(row.lost for row in report.epochs) > 0
