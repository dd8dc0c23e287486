"""The slot protocol under scripted and random faults, on the in-memory network."""

import pytest

from tests.exhaustive.exchange.fault_schedules import Fault, Schedule, drawn_with_owners
from tests.exhaustive.exchange.simulation import (
    KINDS,
    Simulation,
    between_owners,
    boundaries_between_owners,
    complete,
    random_script,
    random_simulation,
    single_fault,
)
from torchtitan_diloco.exchange import deal
from torchtitan_diloco.exchange.memory import Fate


@pytest.mark.parametrize("islands", [1, 2, 3, 5])
def test_without_faults_every_slot_commits_once_with_all_islands(islands: int) -> None:
    simulation = Simulation(islands, 5, seed=1)
    complete(simulation)
    for actor in simulation.actors.values():
        assert actor.log == [(slot, "committed") for slot in range(5)]
        assert actor.state.states[0].version == 5
    assert len({a.state.lineage for a in simulation.actors.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("islands", [2, 3])
def test_one_fault_at_every_message_boundary(islands: int, kind: str) -> None:
    counting = Simulation(islands, 3, seed=0)
    complete(counting)
    boundaries = next(counting.net.boundaries)
    assert boundaries > 3 * islands  # the sweep below covers header, bulk and confirm of several slots
    for number in range(boundaries):
        complete(Simulation(islands, 3, seed=0, script=single_fault(number, kind)))


def test_lost_or_late_messages_change_no_result() -> None:
    """Without crashes, faults cost time and nothing else: same participants, hence the same bits."""
    clean = Simulation(3, 4, seed=3)
    complete(clean)
    expected = clean.actors[0].state.lineage
    for number in range(0, 60, 3):
        for kind in ("drop", "delay", "duplicate"):
            faulty = Simulation(3, 4, seed=3, script=single_fault(number, kind))
            complete(faulty)
            assert {a.state.lineage for a in faulty.actors.values()} == {expected}, (number, kind)


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
def test_several_slots_under_way_commit_like_one_at_a_time(overlap: int) -> None:
    simulation = Simulation(3, 12, seed=5, fragments=4, overlap=overlap)
    complete(simulation)
    for actor in simulation.actors.values():
        assert actor.log == [(slot, "committed") for slot in range(12)]
        assert [state.version for state in actor.state.states] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(5409, id="a slot void under an epoch is offered again under the same one"),
        pytest.param(5837, id="an island left out of a roll offers the slot again"),
        pytest.param(7009199, id="what is left open of a slot that an island has healed past"),
        pytest.param(
            7015078, id="finished islands answer one that still waits for a slot they have forgotten"
        ),
        pytest.param(7018979, id="all are behind in one slot and offer it again in turns"),
        pytest.param(7029239, id="a finished island that came late answers as well"),
        pytest.param(1435819413, id="of two islands each is ahead in another fragment"),
    ],
)
def test_schedules_that_once_came_to_no_end(seed: int) -> None:
    complete(random_simulation(seed))


def test_an_island_without_memory_of_a_slot_that_others_have_passed_heals() -> None:
    """Smallest schedule found: those who had committed a slot died and came back; a third still waited for its outcome."""
    complete(Simulation(3, 6, 2003, random_script(2003 * 7 + 3, 1 + 2003 % 4, 120)))


@pytest.mark.parametrize("islands", [5, 6])
def test_beyond_four_islands_slices_have_owners_and_float32_keeps_its_bits(islands: int, monkeypatch) -> None:
    seen: set[str | None] = set()
    with_owners = Simulation(islands, 4, seed=0, script=lambda b: seen.add(b.stage) or Fate())
    complete(with_owners)
    assert seen == {None, "slices", "merged"}
    monkeypatch.setattr(deal, "FEW", 99)
    seen.clear()
    all_gathered = Simulation(islands, 4, seed=0, script=lambda b: seen.add(b.stage) or Fate())
    complete(all_gathered)
    assert seen == {None, "whole"}
    assert {a.state.lineage for s in (with_owners, all_gathered) for a in s.actors.values()} == {
        with_owners.actors[0].state.lineage
    }


def test_a_run_founded_by_few_gathers_whole_payloads_when_a_fifth_island_comes() -> None:
    """The cut is the run's: what was encoded in one piece is sent in one piece."""
    seen: set[str | None] = set()
    simulation = Simulation(4, 6, seed=0, script=lambda b: seen.add(b.stage) or Fate())
    simulation.net.at(2.5, lambda: simulation.start(4))
    complete(simulation)
    assert simulation.actors[4].log and "slices" not in seen
    assert len({a.state.lineage for a in simulation.actors.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_at_some_boundaries_between_owners(kind: str) -> None:
    """In the second slot, when owners have residuals to lose; the integration tier goes through all of its boundaries."""
    sample = boundaries_between_owners()[::4]
    assert {b.stage for b in sample} == {None, "slices", "merged"}
    for boundary in sample:
        complete(between_owners(single_fault(boundary.number, kind)))


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate"])
def test_lost_or_late_messages_between_owners_change_no_result(kind: str) -> None:
    """Nor do several tries of one slot move a residual: the bits after it are those of a run without faults."""
    clean = between_owners()
    complete(clean)
    expected = clean.actors[0].state.lineage
    for boundary in boundaries_between_owners()[1::5]:
        faulty = between_owners(single_fault(boundary.number, kind))
        complete(faulty)
        assert {a.state.lineage for a in faulty.actors.values()} == {expected}, boundary


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_with_owners(seed: int) -> None:
    """A sample; the integration tier draws others at every run."""
    drawn_with_owners(seed).run()


def test_one_new_epoch_does_not_make_every_island_ask_for_another() -> None:
    """They hear of it one after the other. Each new one costs every slot in its bulk a try; rows of them made slots fail."""
    faults = {21: Fault("drop"), 31: Fault("sender crashes before")}
    simulation = Schedule(3, 6, faults=faults, seed=10103).run()
    assert simulation.commits.keys() == simulation.offers.keys()
