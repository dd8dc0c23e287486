"""Five islands and more, whose slices have owners, over the memory transport: the NumPy reference has the same bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.compare import Mismatch, check_run, rounds
from tests.golden.island import Case, Plan
from tests.golden.memory_run import MemoryRun, run_memory
from tests.golden.reference import Result
from tests.golden.turns import Stuck
from tests.helpers.faults import Fault, plant
from torchtitan_diloco.exchange.memory import Boundary, Fate
from torchtitan_diloco.outer import merger, slices

PLANS = [Plan(4, 13), Plan(4, 13, rows=3), Plan(4, 13, rows=1), Plan(4, 13, rows=4), Plan(4, 13, rows=5)]
UNEVEN = [
    Plan(4, 13),
    Plan(5, 16, rows=3),
    Plan(3, 10, rows=1),
    Plan(4, 13, rows=4),
    Plan(4, 13, rows=2),
    Plan(5, 16),
]
FEEDBACK = pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])


def check(run: MemoryRun, folder: Path) -> list[Result]:
    results = run.check(folder)
    assert len({result.digest for result in results}) == len(results) > 3, "the anchor did not move"
    for result in results:
        if run.case.feedback and run.case.wire != "fp32" and not run.healed:
            assert len(result.owned) == len(run.plans)
            assert all(np.any(values) for _, values in result.owned.values()), "the owners lost nothing"
    return results


@pytest.mark.parametrize("fragments, overlap", [(1, 0), (2, 1)])
@FEEDBACK
def test_float32_goes_through_owners_without_a_changed_bit(feedback, fragments, overlap, tmp_path):
    """The reference of few islands, which knows no owners, has the same anchors."""
    case = Case(feedback=feedback, fragments=fragments, overlap=overlap)
    run = MemoryRun(case, PLANS)
    results = check(run, tmp_path)
    without_owners = check_run(tmp_path, range(5), case.outer())
    assert [r.digest for r in results] == [r.digest for r in without_owners]


@pytest.mark.parametrize("plans", [PLANS, UNEVEN], ids=["5", "6"])
@FEEDBACK
@pytest.mark.parametrize("wire", ["int8", "bf16", "int4", "fp4_e3m0"])
def test_lossy_codecs_are_reproduced(wire, feedback, plans, tmp_path):
    case = Case(wire=wire, feedback=feedback, fragments=2, overlap=1, alpha=0.5)
    check(MemoryRun(case, plans), tmp_path)
    with pytest.raises(Mismatch):  # it is no run of few islands
        check_run(tmp_path, range(len(plans)), case.outer())


@FEEDBACK
def test_slices_without_a_value_change_nothing(feedback, tmp_path):
    """Of topk, whose unit is large: the model's three go to five slices."""
    results = MemoryRun(
        Case(wire="topk", feedback=feedback), [replace(plan, width=60) for plan in PLANS]
    ).check(tmp_path)
    ranges = [part for part, (_, values) in results[-1].owned.items() if values.size]
    assert len(ranges) == (3 if feedback else 0)


@FEEDBACK
@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0"])
def test_stochastic_rounding_is_reproduced(wire, feedback, tmp_path):
    check(MemoryRun(Case(wire=wire, feedback=feedback, rounding="stochastic"), PLANS), tmp_path)


def lose_merged(boundary: Boundary) -> Fate:
    """Slot 3 comes as far as its owners' merges, in all tries."""
    return Fate(delays=()) if boundary.stage == "merged" and boundary.slot == 3 else Fate()


FAILING = MemoryRun(Case(wire="int8", feedback=True, fragments=2), PLANS, script=lose_merged, failed=(3,))


def test_residuals_of_owners_stay_where_they_are_in_a_failed_slot(tmp_path):
    results = check(FAILING, tmp_path)
    assert [result.slot for result in results] == [0, 1, 2, 4, 5, 6, 7]


def test_the_residual_of_an_owner_that_heals_begins_anew(tmp_path):
    case = Case(wire="int8", feedback=True)
    results = check(MemoryRun(case, PLANS, wrong_bits=(1, 1), healed=((1, 1),), skipped={1: [9]}), tmp_path)
    assert {owner for owner, _ in results[1].owned.values()} == {0, 2, 3, 4}
    assert {owner for owner, _ in results[2].owned.values()} == {0, 1, 2, 3, 4}


def test_owners_send_and_receive_twice_what_an_equal_share_is(tmp_path):
    """2 (M - 1) / M b, instead of (M - 1) b."""
    (tmp_path / "few").mkdir()
    run_memory(tmp_path, Case(), PLANS)
    run_memory(tmp_path / "few", Case(), PLANS[:4])
    sizes = [
        sum(event[key] for key in ("bytes_sent", "bytes_received")) // 2
        for folder in (tmp_path, tmp_path / "few")
        for event in rounds(folder / "island-0")[:1]
    ]
    whole = sizes[1] // 3
    assert sizes[0] == pytest.approx(2 * 4 / 5 * whole, rel=0.01)
    total = [0, 0]
    for island in range(5):
        event = rounds(tmp_path / f"island-{island}")[0]
        total[0] += event["bytes_sent"]
        total[1] += event["bytes_received"]
    assert total[0] == total[1] == 2 * 4 * whole


HEALING = MemoryRun(
    Case(wire="int8", feedback=True), PLANS, wrong_bits=(1, 1), healed=((1, 1),), skipped={1: [9]}
)
NOISY = MemoryRun(Case(wire="int8", rounding="stochastic", fragments=2), PLANS)
SEED = "len(self._plans) + fragment, self._island"
FAULTS = [
    Fault("merged slices encoded without the residual", merger, "                merged += kept[j]",
          "                pass", FAILING),
    Fault("an owner's residual never moves", merger, "self._residuals[fragment] = candidates", "pass", FAILING),
    Fault("an owner's residual moves in a failed slot", merger, "if committed and merged_in == slot:",
          "if merged_in == slot:", FAILING),
    Fault("an owner's residual survives a heal", merger, "self._residuals[fragment] = {}", "pass", HEALING),
    Fault("what an encoding has lost is not kept", merger, "error=merged, first", "error=None, first", FAILING),
    Fault("slices merged with other weights", merger, "[replace(c, payload=",
          "[replace(c, tokens=4, payload=", FAILING),
    Fault("noise of the delta's encoding again", merger, SEED, "fragment, self._island", NOISY),
    Fault("noise of another owner", merger, SEED, "len(self._plans) + fragment, 0", NOISY),
    Fault("noise from the slice's beginning", merger, "encoded[here], seed, first=part.start", "encoded[here], seed",
          NOISY),
    Fault("slices cut elsewhere than between blocks", slices, "units * j // count * unit", "numel * j // count", FAILING),
    Fault("slices put together in another order", slices, "[slices[j] for j in range(len(self.sizes))], out",
          "[slices[j] for j in reversed(range(len(self.sizes)))], out", FAILING),
    Fault("owners one further", slices, "(j if j in islands else", "((j + 1) % count if j in islands else", FAILING),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_seen(fault: Fault[MemoryRun], tmp_path, monkeypatch):
    plant(fault, monkeypatch)
    with pytest.raises((Mismatch, Stuck, ValueError)):
        fault.case.check(tmp_path)
