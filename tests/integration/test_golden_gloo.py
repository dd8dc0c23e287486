"""Runs over the gloo transport with real processes, reproduced by the NumPy reference bit for bit."""

import json
from pathlib import Path

import pytest

from tests.golden.compare import check_run, read_send, rounds
from tests.golden.gloo_run import GlooRun, run_gloo
from tests.golden.island import Case, Plan, paces

LAYOUTS = {"1+1": [[0], [2]], "2+2": [[0, 1], [2, 3]], "2+1": [[0, 1], [2]], "1+1+1": [[0], [1], [2]]}
"""Processes of each island."""

PLANS = {
    1: [Plan(1, 3, rows=2), Plan(1, 3, rows=3)],
    7: [Plan(7, 17, rows=2), Plan(7, 16, rows=3)],  # two whole windows, and one of 3 steps against one of 2
}
"""By H."""

WEIGHTS = {"1+1": "equal", "2+2": "steps", "2+1": "tokens"}

RUNS = {
    f"{method}-{ranks}-H{h}": GlooRun(
        f"{method}-{ranks}-H{h}",
        Case(method, WEIGHTS[ranks] if h == 7 else "tokens"),
        PLANS[h],
        LAYOUTS[ranks],
    )
    for ranks in WEIGHTS
    for h in PLANS
    for method in ("local_sgd", "diloco")
}


STREAMING_PLANS = [Plan(8, 17), Plan(10, 21, rows=3), Plan(9, 19, rows=1)]
EVEN_PLANS = [Plan(8, 17), Plan(8, 17, rows=3), Plan(8, 17, rows=1)]


def streaming(ranks: str, plans: list[Plan], **settings) -> GlooRun:
    name = "-".join([ranks, *(f"{key}{value}" for key, value in settings.items())])
    return GlooRun(name, Case(**settings), plans[: len(LAYOUTS[ranks])], LAYOUTS[ranks])


STREAMING = {
    run.name: run
    for run in [
        *(
            streaming(ranks, STREAMING_PLANS, fragments=4, overlap=overlap, alpha=alpha)
            for ranks in ("1+1", "1+1+1")
            for overlap in (0, 1, 3, 7)
            for alpha in (0.0, 0.5)
        ),
        *(streaming(ranks, EVEN_PLANS, fragments=8, overlap=2) for ranks in ("1+1", "1+1+1")),
        streaming("2+1", STREAMING_PLANS, fragments=4, overlap=3, alpha=0.5),
    ]
}


CODECS = {
    run.name: run
    for run in [
        streaming("1+1+1", STREAMING_PLANS, wire="int8", feedback=True, fragments=4, overlap=3, alpha=0.5),
        streaming("1+1", STREAMING_PLANS, wire="int8", rounding="stochastic", fragments=4, overlap=1),
        streaming("2+1", STREAMING_PLANS, wire="fp4_e3m0", feedback=True, fragments=4, overlap=1, alpha=0.5),
        streaming("1+1+1", EVEN_PLANS, wire="fp4_e3m0", fragments=8, overlap=2),
        streaming("1+1+1", EVEN_PLANS, wire="topk", feedback=True, fragments=8, overlap=2),
        streaming("1+1", STREAMING_PLANS, wire="topk", fragments=4, overlap=7, alpha=0.5),
        streaming("1+1", STREAMING_PLANS, wire="int4", feedback=True, rounding="stochastic", fragments=4),
        streaming("1+1", STREAMING_PLANS, wire="bf16", feedback=True, fragments=4, overlap=3),
    ]
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs, done by one set of four processes."""
    folder = tmp_path_factory.mktemp("gloo")
    run_gloo(folder, [*RUNS.values(), *STREAMING.values(), *CODECS.values()], timeout_s=280)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_reference_reproduces_every_anchor_and_the_final_momentum(name, runs):
    results = check_run(runs / name, [0, 1], RUNS[name].case.outer())
    assert len(results) == 3
    assert len({result.digest for result in results}) == 3, "the anchor did not move"


@pytest.mark.parametrize("name", [*STREAMING, *CODECS])
def test_reference_reproduces_streaming_and_every_islands_own_parameters(name, runs):
    run = (STREAMING | CODECS)[name]
    ranks = [len(processes) for processes in run.islands]
    results = check_run(runs / name, range(len(ranks)), run.case.outer(name), paces=paces(run.plans, ranks))
    assert len({result.digest for result in results}) == len(results) >= 8


def test_digests_are_equal_whatever_the_vector_width_and_the_number_of_threads(tmp_path):
    # A model of about 300,000 parameters: elementwise operations are split between threads from 32,768 elements on.
    plans = [Plan(2, 10, rows=2, width=500), Plan(2, 10, rows=3, width=500)]
    methods = ["diloco", "local_sgd"]
    run_gloo(
        tmp_path,
        [GlooRun(method, Case(method), plans, [[0], [1]]) for method in methods],
        timeout_s=120,
        environments={
            0: {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
            1: {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
        },
    )
    for method in methods:
        run = tmp_path / method
        cpus = [json.loads((run / f"island-{i}" / "cpu.json").read_text()) for i in (0, 1)]
        assert [(cpu["capability"], cpu["threads"]) for cpu in cpus] == [("DEFAULT", 1), ("AVX2", 2)]
        assert cpus[0]["fused"] != cpus[1]["fused"], "both compute alike, so equal digests say nothing"
        first, second = [[event["digest"] for event in rounds(run / f"island-{i}")] for i in (0, 1)]
        assert first == second
        assert len(set(first)) == 5
        check_run(run, [0, 1], Case(method).outer())


OWNERS = {
    run.name: run
    for run in [
        GlooRun("owners-fp32", Case(), [Plan(4, 9, rows=1 + i) for i in range(5)], [[i] for i in range(5)]),
        GlooRun(
            "owners-int8",
            Case(fragments=3, overlap=1, wire="int8", feedback=True, rounding="stochastic"),
            [Plan(4, 9, rows=1 + i) for i in range(5)],
            [[i] for i in range(5)],
        ),
    ]
}
"""Five islands, whose slices have owners."""


@pytest.mark.slow
def test_slices_of_five_islands_are_merged_by_their_owners(tmp_path):
    run_gloo(tmp_path, list(OWNERS.values()), timeout_s=150)
    for name, run in OWNERS.items():
        outer = run.case.outer(name, islands=5)
        results = check_run(tmp_path / name, range(5), outer, paces=paces(run.plans))
        assert len({result.digest for result in results}) == len(results) >= 3
        if run.case.feedback:
            assert all(len(result.owned) == 5 for result in results)
            continue
        # Of a payload of b bytes, M islands send 2 (M - 1) b together.
        sent = read_send(tmp_path / name / "island-0" / "sends" / "slot-000000.safetensors").parameters
        payload = sum(values.nbytes for values in sent.values())
        events = [rounds(tmp_path / name / f"island-{i}")[0] for i in range(5)]
        assert sum(event["bytes_sent"] for event in events) == 8 * payload
        assert sum(event["bytes_received"] for event in events) == 8 * payload
        for event in events:
            assert abs(event["bytes_sent"] / (8 * payload / 5) - 1) < 0.01
