"""The benchmark of our overhead: its command line, and the arithmetic between its clock and its verdict."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import inner_overhead

    return inner_overhead


def test_its_defaults_measure_the_quickstart_in_under_three_minutes(benchmark):
    arguments = benchmark.parse([])
    assert Path(arguments.config).name == "quickstart.toml" and Path(arguments.config).exists()
    assert (arguments.transport, arguments.ranks) == ("memory", 1)
    assert arguments.seconds <= 120


@pytest.mark.parametrize(
    "wrong", [["--ranks", "0"], ["--transport", "pigeon"], ["--block-steps", "many"], ["--fast"]]
)
def test_a_wrong_flag_is_refused(benchmark, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse(wrong)
    assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_both_sides_go_first_equally_often_and_steady_drift_cancels(benchmark):
    turns = [side for pair in benchmark.order_of_turns(64) for side in pair]
    assert all(sorted(pair) == [0, 1] for pair in benchmark.order_of_turns(64))
    positions = [[i for i, side in enumerate(turns) if side == s] for s in (0, 1)]
    assert sum(positions[0]) == sum(positions[1])


def test_the_interval_holds_the_median_and_narrows_with_more_pairs(benchmark):
    few = [0.9, 0.95, 1.0, 1.05, 1.1]
    low, high = benchmark.interval(few)
    assert low <= 1.0 <= high
    narrow_low, narrow_high = benchmark.interval(few * 40)
    assert narrow_high - narrow_low < high - low


def test_the_verdict_is_the_intervals(benchmark):
    assert benchmark.verdict(0.985, 1.01, 0.98) == "met"
    assert benchmark.verdict(0.94, 0.97, 0.98) == "MISSED"
    assert benchmark.verdict(0.97, 1.01, 0.98).startswith("not resolved (the interval holds it)")
    assert benchmark.verdict(1.02, 1.28, 0.98).startswith("not resolved (the interval is wider")
