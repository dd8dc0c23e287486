"""Streaming DiLoCo with lossy codecs over the memory transport, reproduced by the NumPy reference bit for bit.

Anchors, momenta, residuals, and the parameters of every island after every step.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.golden.codec_runs import EVEN, PLANS, WIDE, with_a_heal, with_a_listener, with_failures
from tests.golden.compare import last_checkpoint, read_send, rounds
from tests.golden.island import Case
from tests.golden.memory_run import MemoryRun
from tests.golden.reference import Result

FEEDBACK = pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])


def check(run: MemoryRun, folder: Path) -> list[Result]:
    results = run.check(folder)
    assert len({result.digest for result in results}) == len(results), "the anchor did not move"
    for result in results:
        if run.case.feedback and run.case.wire != "fp32":
            assert all(np.any(r) for r in result.residuals.values()) or run.healed, "the codec lost nothing"
    return results


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [0, 1, 3, 7])
@FEEDBACK
@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0", "topk"])
def test_four_fragments_are_reproduced(wire, feedback, overlap, alpha, tmp_path):
    case = Case(wire=wire, feedback=feedback, fragments=4, overlap=overlap, alpha=alpha)
    assert len(check(MemoryRun(case, PLANS), tmp_path)) >= 9


@FEEDBACK
@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0", "topk"])
def test_two_islands_are_reproduced(wire, feedback, tmp_path):
    case = Case(wire=wire, feedback=feedback, fragments=4, overlap=3, alpha=0.5)
    assert len(check(MemoryRun(case, PLANS[:2]), tmp_path)) >= 9


@pytest.mark.parametrize("islands", [2, 3])
@FEEDBACK
@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0", "topk"])
def test_as_many_fragments_as_steps_are_reproduced(wire, feedback, islands, tmp_path):
    case = Case(wire=wire, feedback=feedback, fragments=8, overlap=2)
    assert {r.fragment for r in check(MemoryRun(case, EVEN[:islands]), tmp_path)} == set(range(8))


@FEEDBACK
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4"])
def test_the_other_codecs_are_reproduced(wire, feedback, tmp_path):
    check(MemoryRun(Case(wire=wire, feedback=feedback, fragments=4, overlap=3, alpha=0.5), PLANS), tmp_path)


@FEEDBACK
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "fp4_e3m0", "topk"])
def test_stochastic_rounding_is_reproduced(wire, feedback, tmp_path):
    case = Case(wire=wire, feedback=feedback, rounding="stochastic", fragments=4, overlap=1)
    check(MemoryRun(case, PLANS), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case(wire="topk", feedback=True),
        Case(wire="topk", density=1 / 8, rounding="stochastic"),
        Case(wire="int4", block=10, feedback=True),
        Case("local_sgd", wire="fp4_e3m0", block=128, feedback=True),
    ],
    ids=["topk", "topk-density", "int4-block", "local-sgd-fp4-block"],
)
def test_whole_model_in_one_fragment_is_reproduced(case, tmp_path):
    check(MemoryRun(case, WIDE), tmp_path)


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0", "topk"])
def test_the_residual_stays_where_it_is_in_a_failed_slot(wire, overlap, tmp_path):
    case = Case(wire=wire, feedback=True, fragments=4, overlap=overlap, alpha=0.5)
    check(with_failures(case), tmp_path)
    for island in range(3):
        send = read_send(tmp_path / f"island-{island}" / "sends" / "slot-000009.safetensors")
        assert send.steps == 16 - overlap  # over the failed slot: its work is in slot 9


@pytest.mark.parametrize("wire", ["int8", "fp4_e3m0", "topk"])
def test_the_residual_of_an_island_that_heals_begins_anew(wire, tmp_path):
    case = Case(wire=wire, feedback=True, fragments=4, alpha=0.5)
    results = check(with_a_heal(case), tmp_path)
    (healed,) = [result for result in results if result.slot == 5]
    assert not np.any(healed.residuals[1]) and np.any(healed.residuals[0]) and np.any(healed.residuals[2])
    assert [e["round"] for e in rounds(tmp_path / "island-1") if not e["committed"]] == [5]


def test_the_residual_of_an_island_without_a_part_in_the_slot_stays(tmp_path):
    case = Case(wire="int4", feedback=True, fragments=4, overlap=1, alpha=0.5)
    results = check(with_a_listener(case), tmp_path)
    assert results[-1].participants == (1,)
    before = next(result for result in reversed(results[:-1]) if result.fragment == 3)
    for island, moves in enumerate([False, True, False]):
        assert np.array_equal(results[-1].residuals[island], before.residuals[island]) != moves
        assert (last_checkpoint(tmp_path / f"island-{island}") / "outer.safetensors").is_file()
