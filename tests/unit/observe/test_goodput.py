"""What faults have cost, from traces whose right figures are worked out by hand."""

from typing import Any

import pytest

from torchtitan_diloco.observe.goodput import Happened, measure

SYNC_EVERY, TOKENS = 2, 10


def trace(steps: list[float], incarnation: str = "a", loss: Any = 1.0) -> list[dict[str, Any]]:
    """Inner steps of one second at these moments."""
    return [
        {"event": "inner", "t": t, "step": i, "incarnation": incarnation, "loss": loss}
        | {"tokens": TOKENS, "seconds": 1.0}
        for i, t in enumerate(steps, 1)
    ]


def slot(number: int, t: float, tokens: int, digest: str = "aa", stall_s: float = 0.0) -> dict[str, Any]:
    return {
        "event": "round",
        "t": t,
        "round": number,
        "fragment": 0,
        "version": number,
        "committed": True,
    } | {
        "tokens": tokens,
        "digest": digest,
        "stall_s": stall_s,
    }


def seconds(first: int, last: int) -> list[float]:
    return [float(t) for t in range(first, last + 1)]


EVERY = {0: SYNC_EVERY, 1: SYNC_EVERY}


def test_without_faults_everything_that_is_possible_is_committed() -> None:
    slots = [slot(n, 100.0 + 2 * n, 40) for n in range(1, 6)]
    events = {i: trace(seconds(101, 110)) + slots for i in (0, 1)}
    found = measure(events, [], 100.0, 110.0, 1, EVERY)
    assert (found.committed, found.possible, found.goodput, found.expected) == (200, 200, 1.0, 1.0)
    assert found.problems == [] and found.uncommitted_s == 0


def test_each_token_counts_once_in_however_many_fragments() -> None:
    slots = [slot(n, 100.0 + n, 40) for n in range(1, 11)]  # two slots in each window of two steps
    events = {i: trace(seconds(101, 110)) + slots for i in (0, 1)}
    found = measure(events, [], 100.0, 110.0, 2, EVERY)
    assert (found.committed, found.possible) == (200, 200)


def test_a_killed_island_is_missed_from_the_fault_to_its_next_incarnations_first_step() -> None:
    mine = trace(seconds(101, 104)) + trace(seconds(109, 110), "b")
    events = {0: trace(seconds(101, 110)), 1: mine}
    events[0] += [slot(n, 100.0 + 2 * n, 40 if n in (1, 2, 5) else 20) for n in range(1, 6)]
    found = measure(events, [Happened(104.0, "kill", 1, 106.0)], 100.0, 110.0, 1, EVERY)
    assert found.downtime_s == {"kill": 4.0}, "the fifth second is the step's own"
    assert found.committed == 160 and found.goodput == 0.8
    assert found.expected == pytest.approx(1 - 4 / 20)


def test_steps_that_no_slot_holds_are_lost_too() -> None:
    mine = trace(seconds(101, 103)) + trace(seconds(105, 110), "b")
    events = {0: trace(seconds(101, 110)), 1: mine}
    events[0] += [slot(n, 100.0 + 2 * n, 20 if n == 2 else 40) for n in range(1, 6)]
    found = measure(events, [Happened(103.0, "kill", 1, 104.0)], 100.0, 110.0, 1, EVERY)
    # It has made nine steps, of which eight are in slots; and one second without a step.
    assert found.uncommitted_s == pytest.approx(1.0)
    assert found.expected == pytest.approx(1 - 2 / 20) and found.goodput == pytest.approx(0.9)


def test_an_island_that_leaves_in_good_order_is_missed_only_once_it_has_left() -> None:
    mine = trace(seconds(101, 104)) + trace(seconds(108, 110), "b")
    events = {0: trace(seconds(101, 110)), 1: mine}
    found = measure(events, [Happened(102.5, "walltime", 1, 103.0)], 100.0, 110.0, 1, EVERY)
    assert found.downtime_s == {"walltime": 3.0}


@pytest.mark.parametrize("kind", ["freeze", "cut", "disk_full", "nan"])
def test_of_other_faults_the_pauses_count_that_begin_before_they_are_over(kind: Any) -> None:
    events = {0: trace(seconds(101, 110)), 1: trace([101.0, 102.0, 103.0, 106.0, 107.0, 110.0])}
    found = measure(events, [Happened(103.5, kind, 1, 105.5)], 100.0, 110.0, 1, EVERY)
    assert found.downtime_s == {kind: pytest.approx(1.5)}, (
        "106 less 103.5 less the step; 107 to 110 came after"
    )


def test_an_island_that_has_not_come_back_is_missed_to_the_end() -> None:
    events = {0: trace(seconds(101, 110)), 1: trace(seconds(101, 104))}
    found = measure(events, [Happened(104.0, "kill", 1, 105.0)], 100.0, 110.0, 1, EVERY)
    assert found.downtime_s == {"kill": 5.0}


def test_the_pause_of_an_unharmed_island_is_told_and_a_harmed_ones_is_not() -> None:
    events = {
        0: trace([*seconds(101, 104), 107.5, *seconds(108, 110)]),
        1: trace([*seconds(101, 103), *seconds(109, 110)]),
    }
    faults = [Happened(103.5, "freeze", 1, 107.0)]
    assert measure(events, faults, 100.0, 110.0, 1, EVERY).gap_s == {"freeze": 3.5}
    both = [*faults, Happened(104.0, "freeze", 0, 107.0)]
    assert measure(events, both, 100.0, 110.0, 1, EVERY).gap_s == {"freeze": 1.0}, "of its steps before"


def test_what_was_before_and_after_counts_for_nothing() -> None:
    events = {i: [*trace(seconds(91, 120)), slot(1, 95.0, 40), slot(9, 115.0, 40)] for i in (0, 1)}
    found = measure(events, [], 100.0, 110.0, 1, EVERY)
    assert found.committed == 0 and found.possible == 200


def test_waiting_for_exchanges_is_added_up() -> None:
    events = {i: [*trace(seconds(101, 110)), slot(1, 104.0, 40, stall_s=0.25)] for i in (0, 1)}
    assert measure(events, [], 100.0, 110.0, 1, EVERY).stall_s == 0.5


def test_two_digests_of_a_version_are_a_problem() -> None:
    events = {
        0: [*trace(seconds(101, 110)), slot(1, 102.0, 40, "aa")],
        1: [*trace(seconds(101, 110)), slot(1, 102.0, 40, "bb")],
    }
    assert measure(events, [], 100.0, 110.0, 1, EVERY).problems == ["fragment 0, version 1: 2 digests"]


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), "nan"])
def test_a_loss_that_is_no_number_is_a_problem_where_none_was_planted(loss: Any) -> None:
    events = {0: trace(seconds(101, 110)), 1: trace(seconds(101, 102)) + trace([103.0], loss=loss)}
    assert measure(events, [], 100.0, 110.0, 1, EVERY).problems == [
        "island 1: 1 losses are no numbers, the first at step 1"
    ]
    planted = [Happened(102.5, "nan", 1, 103.0)]
    assert measure(events, planted, 100.0, 110.0, 1, EVERY).problems == []


def test_an_island_without_a_step_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="no inner step"):
        measure({0: []}, [], 0.0, 1.0, 1, {0: 1})
