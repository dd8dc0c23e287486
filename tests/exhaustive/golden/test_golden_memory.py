"""Runs over the memory transport, reproduced by the NumPy reference bit for bit."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.golden.compare import Mismatch, check_run, last_checkpoint, read_send, rounds
from tests.golden.island import Case, Plan, paces, slots_of
from tests.golden.memory_run import run_memory
from tests.golden.reference import shares
from torchtitan_diloco.exchange.memory import Boundary, Fate
from torchtitan_diloco.outer.merge import weights

# Islands that differ in steps per slot and in tokens per step; the last window is shorter (and unequal) where H is 7.
EVERY_STEP = [Plan(1, 4, rows=2), Plan(2, 8, rows=3), Plan(3, 12, rows=1)]
EVERY_SEVENTH = [Plan(7, 24, rows=2), Plan(5, 16, rows=3), Plan(6, 20, rows=1)]


@pytest.mark.parametrize("weight", ["tokens", "steps", "equal"])
@pytest.mark.parametrize("plans", [EVERY_STEP, EVERY_SEVENTH], ids=["H1", "H7"])
@pytest.mark.parametrize("islands", [2, 3])
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_reference_reproduces_every_anchor_and_the_final_momentum(method, islands, plans, weight, tmp_path):
    case = Case(method, weight)
    run_memory(tmp_path, case, plans[:islands])
    results = check_run(tmp_path, range(islands), case.outer())
    assert len(results) == 4
    assert len({result.digest for result in results}) == 4, "the anchor did not move"
    if weight != "equal":
        assert len(set(results[0].weights)) == islands, (
            "the islands' weights do not differ, so nothing was tested"
        )


def test_unequal_windows_are_what_was_sent(tmp_path):
    run_memory(tmp_path, Case(), EVERY_SEVENTH)
    sent = [
        [
            (send.steps, send.tokens)
            for send in map(read_send, sorted((tmp_path / f"island-{i}" / "sends").glob("slot-*")))
        ]
        for i in range(3)
    ]
    assert sent[0] == [(7, 112)] * 3 + [(3, 48)]
    assert sent[1] == [(5, 120)] * 3 + [(1, 24)]
    assert sent[2] == [(6, 48)] * 3 + [(2, 16)]


@pytest.mark.parametrize("fragments, overlap", [(1, 0), (2, 2)])
def test_islands_of_a_run_with_a_sync_every_of_their_own_are_reproduced(fragments, overlap, tmp_path):
    case = Case(fragments=fragments, overlap=overlap, run=(10, 34))
    plans = [Plan(10, 34, rows=2), Plan(5, 17, rows=3), Plan(30, 102, rows=1)]
    islands = run_memory(tmp_path, case, plans)
    results = check_run(tmp_path, range(3), case.outer(), paces=paces(plans))
    assert len(results) == 3 * fragments + fragments
    assert len({result.digest for result in results}) == len(results), "the anchor did not move"
    if fragments == 1:
        assert results[0].weights == shares([(10, 160), (5, 120), (30, 240)], "tokens")
    for island, plan in zip(islands, plans, strict=True):
        assert island.step == island.method.last_step() == plan.steps
        assert island.method.progress(island.step) == 34


@pytest.mark.parametrize(
    "case",
    [
        Case(nesterov=False),
        Case(momentum=0.0),
        Case(lr=1.3, momentum=0.37),
        Case(momentum=0.5, lr=0.1, nesterov=False),
    ],
    ids=["heavy-ball", "no-momentum", "large-lr", "small-lr"],
)
def test_reference_reproduces_other_outer_settings(case, tmp_path):
    run_memory(tmp_path, case, EVERY_SEVENTH)
    check_run(tmp_path, range(3), case.outer())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("fragments, overlap", [(1, 0), (3, 1)])
def test_reference_reproduces_a_schedule(schedule, fragments, overlap, tmp_path):
    case = Case(schedule=schedule, fragments=fragments, overlap=overlap)
    run_memory(tmp_path, case, EVERY_SEVENTH)
    slots = slots_of(case, EVERY_SEVENTH[0])
    check_run(tmp_path, range(3), case.outer(slots=slots))
    with pytest.raises(Mismatch, match=r"slot \d, digest"):
        check_run(tmp_path, range(3), case.outer(slots=slots + 1))


def test_one_island_alone_is_reproduced(tmp_path):
    run_memory(tmp_path, Case(), [Plan(7, 24)])
    check_run(tmp_path, [0], Case().outer())


def test_an_island_that_trains_in_bfloat16_is_reproduced(tmp_path):
    islands = run_memory(tmp_path, Case(), [Plan(7, 24), Plan(7, 24, dtype="bfloat16")])
    coarse = {1: frozenset(islands[1].method.parameters.specs)}
    check_run(tmp_path, [0, 1], Case().outer(), coarse=coarse)
    with pytest.raises(Mismatch, match="slot 0, digest"):
        check_run(tmp_path, [0, 1], Case().outer())


def test_a_failed_slot_changes_nothing_and_the_next_window_is_longer(tmp_path):
    bulks = iter(range(1_000_000))

    def lose_the_second_slot(boundary: Boundary) -> Fate:
        # Two islands: two bulk messages a try. Slot 0 takes one try, slot 1 three, which is all it gets.
        lost = boundary.kind == "bulk" and 2 <= next(bulks) < 8
        return Fate(delays=()) if lost else Fate()

    run_memory(tmp_path, Case(), [Plan(7, 28, rows=2), Plan(7, 28, rows=3)], lose_the_second_slot)
    for island in (0, 1):
        events = rounds(tmp_path / f"island-{island}")
        assert [event["committed"] for event in events] == [True, False, True, True]
        assert events[1]["digest"] == events[0]["digest"]
        assert read_send(tmp_path / f"island-{island}" / "sends" / "slot-000002.safetensors").steps == 14
    assert [result.slot for result in check_run(tmp_path, [0, 1], Case().outer(), failed=[1])] == [0, 2, 3]


def test_weights_do_not_depend_on_how_python_adds_up_floats():
    # sum() compensates from Python 3.12 on and does not before, and islands need not run the same Python.
    counts = [(4, 16), (6, 16), (1, 16)]
    raw = [tokens * tokens / steps for steps, tokens in counts]
    assert raw[0] + raw[1] + raw[2] != math.fsum(raw), (
        "counts whose sum does not depend on the rounding of its parts"
    )
    assert tuple(weights(counts, "tokens")) == shares(counts, "tokens")


def test_the_comparison_sees_one_changed_bit(tmp_path):
    run_memory(tmp_path, Case(), [Plan(7, 14), Plan(7, 14)])
    path = last_checkpoint(tmp_path / "island-1") / "outer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Mismatch, match=r"island 1, step-14, momentum\.0: 1 of"):
        check_run(tmp_path, [0, 1], Case().outer())


def test_the_comparison_sees_a_changed_send(tmp_path):
    run_memory(tmp_path, Case(), [Plan(7, 14), Plan(7, 14)])
    path: Path = tmp_path / "island-0" / "sends" / "slot-000001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(Mismatch, match="slot 1, digest"):
        check_run(tmp_path, [0, 1], Case().outer())


def test_events_carry_weights_exactly(tmp_path):
    run_memory(tmp_path, Case(), EVERY_SEVENTH)
    event = rounds(tmp_path / "island-0")[0]
    assert json.loads(json.dumps(event["weights"])) == list(shares([(7, 112), (5, 120), (6, 48)], "tokens"))
    assert np.isclose(sum(event["weights"]), 1.0, rtol=0, atol=1e-15)
