"""Streaming DiLoCo over the memory transport, reproduced by the NumPy reference bit for bit, local parameters included."""

from pathlib import Path

import pytest

from tests.golden.compare import check_run, read_send, rounds
from tests.golden.island import Case, Plan, paces
from tests.golden.memory_run import run_memory
from tests.golden.reference import schedule
from torchtitan_diloco.exchange.memory import Boundary, Fate

# Islands that differ in steps per window and in tokens per step.
PLANS = [Plan(8, 17), Plan(10, 21, rows=3), Plan(9, 19, rows=1), Plan(8, 17, rows=1), Plan(12, 25)]
EVEN = [Plan(8, 17, rows=rows) for rows in (2, 3, 1, 1, 2)]


def check(folder: Path, case: Case, plans: list[Plan], coarse=None) -> list:
    run_memory(folder, case, plans)
    return check_run(folder, range(len(plans)), case.outer(), paces=paces(plans), coarse=coarse)


@pytest.mark.parametrize("islands", [2, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [0, 1, 3, 7])
def test_four_fragments_are_reproduced(overlap, alpha, islands, tmp_path):
    case = Case(fragments=4, overlap=overlap, alpha=alpha)
    results = check(tmp_path, case, PLANS[:islands])
    assert {result.fragment for result in results} == {0, 1, 2, 3}
    assert len({result.digest for result in results}) == len(results) >= 9


@pytest.mark.parametrize("islands", [2, 3, 5])
def test_as_many_fragments_as_steps_are_reproduced(islands, tmp_path):
    results = check(tmp_path, Case(fragments=8, overlap=2), EVEN[:islands])
    assert {result.fragment for result in results} == set(range(8))


def test_an_island_that_trains_in_bfloat16_mixes_and_rounds_as_the_reference(tmp_path):
    plans = [Plan(8, 25), Plan(8, 25, rows=3, dtype="bfloat16")]
    case = Case(fragments=4, overlap=3, alpha=0.25)
    islands = run_memory(tmp_path, case, plans)
    coarse = {1: frozenset(islands[1].method.parameters.specs)}
    check_run(tmp_path, [0, 1], case.outer(), paces=paces(plans), coarse=coarse)


def test_local_sgd_streams_too(tmp_path):
    check(tmp_path, Case("local_sgd", fragments=3, overlap=2, alpha=0.5), PLANS[:3])


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_failed_slot_leaves_its_fragment_and_the_others_go_on(overlap, tmp_path):
    """Slot 5 loses its bulk in all three tries: the parameters and counters of fragment 1 go on to slot 9."""

    def lose_the_sixth_slot(boundary: Boundary) -> Fate:
        return Fate(delays=()) if boundary.kind == "bulk" and boundary.slot == 5 else Fate()

    case = Case(fragments=4, overlap=overlap, alpha=0.5)
    plans = [Plan(8, 25), Plan(8, 25, rows=3), Plan(8, 25, rows=1)]
    run_memory(tmp_path, case, plans, lose_the_sixth_slot)
    check_run(tmp_path, range(3), case.outer(), paces=paces(plans), failed=[5])
    for island in range(3):
        events = rounds(tmp_path / f"island-{island}")
        assert not events[5]["committed"]
        assert events[5]["digest"] == events[1]["digest"]
        assert (
            read_send(tmp_path / f"island-{island}" / "sends" / "slot-000009.safetensors").steps
            == 16 - overlap
        )


def test_the_schedule_of_the_reference_is_the_papers():
    """Streaming DiLoCo, arXiv 2501.18512, algorithm 2: every fragment once in H steps, applied tau later."""
    turns = schedule(8, 17, Case(fragments=4, overlap=3).outer())
    assert [(t.fragment, t.sent, t.applied) for t in turns[:8]] == [
        (0, 2, 5), (1, 4, 7), (2, 6, 9), (3, 8, 11), (0, 10, 13), (1, 12, 15), (2, 14, 17), (3, 16, 17),
    ]  # fmt: skip
    assert [(t.fragment, t.sent, t.applied) for t in turns[8:]] == [(f, 17, 17) for f in range(4)]
