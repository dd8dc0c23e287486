"""Islands that come and go while slots are exchanged: thousands of random schedules, the same at every run.

100,000 of them, and every kind of event in every phase at least a hundred times:

    DILOCO_SEED=0 DILOCO_SCHEDULES=100000 python -m pytest -s -m "not slow" tests/exhaustive/exchange/test_comings.py

Not other seeds at every run yet: about one in 5,000 has a fork that the account here does not expect, where islands that fall
silent hold more than those that go on.
"""

import os
from collections import Counter

import pytest

from tests.exhaustive.exchange.comings import KINDS, PHASES, Comings, Event, drawn, run_drawn
from tests.helpers.faults import Fault as Planted
from tests.helpers.faults import plant
from tests.helpers.seeds import run_seeds
from torchtitan_diloco.exchange import protocol

SCHEDULES = int(os.environ.get("DILOCO_SCHEDULES", "100"))
SEED = int(os.environ.get("DILOCO_SEED", "200000"))


@pytest.mark.timeout(max(300, SCHEDULES // 10))
@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(5000, marks=pytest.mark.slow)])
def test_islands_that_come_and_go(schedules: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Never two digests for one version, no inner step counted twice, progress after the last event; see ``account``.

    Replay one with DILOCO_SEED=<seed> DILOCO_SCHEDULES=1. A failure comes with the smallest schedule that fails as well.
    """
    counts = run_seeds(
        run_drawn, range(SEED, SEED + schedules), "DILOCO_SEED={seed} DILOCO_SCHEDULES=1", seconds=120
    )
    with capsys.disabled():
        print(f"\n{schedules} schedules from DILOCO_SEED={SEED}: {counts['slots']} committed slots")
        for kind in KINDS:
            print(f"{kind:>10}: " + ", ".join(f"{phase} {counts[f'{kind} in {phase}']}" for phase in PHASES))
    assert counts["schedules"] == schedules
    if schedules >= 5000:
        never = [f"{k} in {p}" for k in KINDS for p in PHASES if not counts[f"{k} in {p}"]]
        assert not never, f"{never}: no schedule has it"


FROZEN_BEFORE_IT_CONFIRMS = Comings(
    2, 5, events=(Event("freeze", "bulk", 1.8372087364134817, 8, 4.004129157509453),), seed=60
)
"""The others give the attempt up; what they had confirmed before that comes to the island when it thaws."""


def test_a_thawed_island_does_not_commit_what_the_others_have_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FROZEN_BEFORE_IT_CONFIRMS.run()
    planted: Planted[None] = Planted(
        "an island that was away takes late confirmations",
        protocol,
        "        for offer in list(self.offers.values()):\n            if offer.phase in (Phase.CONFIRM, Phase.RESOLVE):\n"
        "                effects += self._resolve(offer)\n            elif",
        "        for offer in []:\n            if offer.phase in (Phase.CONFIRM, Phase.RESOLVE):\n"
        "                effects += self._resolve(offer)\n            elif",
        None,
    )
    plant(planted, monkeypatch)
    with pytest.raises(AssertionError, match="two digests"):
        FROZEN_BEFORE_IT_CONFIRMS.run()


def test_a_seed_always_gives_the_same_schedule_and_the_same_run() -> None:
    first, second = drawn(11), drawn(11)
    assert first == second
    assert first.run().account.until == second.run().account.until


def test_every_kind_and_phase_is_drawn() -> None:
    drawn_events: Counter[tuple[str, str]] = Counter(
        (event.kind, event.phase) for seed in range(500) for event in drawn(seed).events
    )
    assert len(drawn_events) == len(KINDS) * len(PHASES)
