"""Runs over the hub, reproduced by the NumPy reference bit for bit; with fp32 they are those of the other transports."""

from pathlib import Path

import pytest

from tests.golden.compare import rounds
from tests.golden.hub_run import HubRun
from tests.golden.island import Case, Plan
from tests.golden.memory_run import MemoryRun

WINDOWS = [Plan(7, 17, rows=2), Plan(7, 17, rows=3), Plan(7, 17, rows=1)]
STREAMING = [Plan(8, 17), Plan(8, 17, rows=3), Plan(8, 17, rows=1)]
FIVE = [Plan(4, 9, rows=rows) for rows in (1, 2, 3, 1, 2)]

PLAIN = {
    "local_sgd": HubRun(Case("local_sgd", "equal"), WINDOWS),
    "diloco": HubRun(Case(), WINDOWS),
    "H of its own": HubRun(Case(run=(10, 34)), [Plan(10, 34, rows=2), Plan(5, 17, rows=3)]),
    "streaming": HubRun(Case(fragments=4, overlap=3, alpha=0.5), STREAMING),
    "all in flight": HubRun(Case(fragments=8, overlap=7, schedule="cosine"), STREAMING),
    "five islands": HubRun(Case(fragments=2, overlap=1), FIVE),
}
ENCODED = {
    "int8, feedback": HubRun(Case(wire="int8", feedback=True, fragments=4, overlap=3, alpha=0.5), STREAMING),
    "int8, stochastic": HubRun(
        Case(wire="int8", rounding="stochastic", fragments=4, overlap=1), STREAMING[:2]
    ),
    "fp4, feedback": HubRun(Case(wire="fp4_e3m0", feedback=True, fragments=2, overlap=1), STREAMING),
    "topk": HubRun(Case(wire="topk", fragments=4), STREAMING),
    "topk, feedback": HubRun(Case(wire="topk", feedback=True, fragments=4, overlap=1), STREAMING),
    "bf16, five islands": HubRun(Case(wire="bf16", feedback=True, fragments=2), FIVE),
    "int8, feedback, five islands": HubRun(Case(wire="int8", block=4, feedback=True), FIVE),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", PLAIN.values(), ids=PLAIN)
def test_with_fp32_all_transports_make_the_same_anchors_in_the_same_slots(
    run: HubRun, tmp_path: Path
) -> None:
    over_the_hub = run.check(tmp_path / "hub")
    in_memory = MemoryRun(run.case, run.plans).check(tmp_path / "memory")
    assert [(r.slot, r.digest) for r in over_the_hub] == [(r.slot, r.digest) for r in in_memory]
    for island in range(len(run.plans)):
        events = [rounds(tmp_path / kind / f"island-{island}") for kind in ("hub", "memory")]
        kept = (
            "round",
            "step",
            "fragment",
            "version",
            "participants",
            "weights",
            "tokens",
            "committed",
            "digest",
        )
        assert [[e[k] for k in kept] for e in events[0]] == [[e[k] for k in kept] for e in events[1]]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", ENCODED.values(), ids=ENCODED)
def test_what_the_hub_encodes_is_the_references(run: HubRun, tmp_path: Path) -> None:
    """It encodes the merged delta once more, with a residual of its own."""
    assert len(run.check(tmp_path)) >= 3
