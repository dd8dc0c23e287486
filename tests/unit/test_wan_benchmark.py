"""The benchmark over an emulated link: its command line, and the arithmetic between its clock and its table."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import wan

    return wan


def result(benchmark, exchange_s: float, losses: float = 5.0, step_s: float = 0.5, windows: int = 3):
    """Two islands whose steps all take ``step_s``, and the last of a window ``exchange_s`` more; the first window is cold."""
    window = [step_s] * (benchmark.SYNC_EVERY - 1)
    seconds = [*window, step_s + 100.0, *[*window, step_s + exchange_s] * (windows - 1)]
    return benchmark.Result(
        seconds=[seconds, seconds],
        losses=[[9.0] * (len(seconds) - benchmark.TAIL_STEPS) + [losses] * benchmark.TAIL_STEPS] * 2,
        rounds=[
            [{"step": 40, "round": 1, "committed": True, "exchange_s": 0.9 * exchange_s + late}]
            for late in (0.0, 3.0)  # one island waits for the other
        ],
        wall_s=sum(seconds),
        cpu=0.5,
        machine_cpu=0.5,
    )


def test_its_defaults_are_three_repeats_of_all_arms_at_both_rates(benchmark):
    arguments = benchmark.parse([])
    assert arguments.repeats == 3 and arguments.rates == [100.0, 20.0] and arguments.delay_ms == 25.0
    assert arguments.overlap <= 4 and benchmark.CONFIG.exists()
    runs = benchmark.plan(arguments)
    assert len(runs) == len(set(runs)) == 3 * (3 + 2 + 2)  # only streaming is compared with an unlimited link
    assert {run.arm for run in runs if run.rate_mbit == 0} == {"streaming"}


def test_streams_are_those_of_our_arms_and_earlier_results_had_one(benchmark):
    runs = benchmark.plan(benchmark.parse(["--streams", "4", "--loss", "1e-4", "--repeats", "1"]))
    assert {(run.arm, run.streams, run.loss) for run in runs} == {
        ("torchft", 1, 1e-4), ("plain", 4, 1e-4), ("streaming", 4, 1e-4),
    }  # fmt: skip
    words = benchmark.words_of(runs[2], 0, "http://h:1")
    assert words[words.index("--transport.streams") + 1] == "4"
    assert "--transport.streams" not in benchmark.words_of(runs[1], 0, "http://h:1")
    old = benchmark.Run("plain", 100.0, 0, 100, 0.6, 25.0, 2, "default")
    assert (old.loss, old.streams) == (0.0, 1)


@pytest.mark.parametrize(
    "wrong", [["--steps", "70"], ["--steps", "40"], ["--overlap", "5"], ["--arms", "pigeon"], ["--fast"]]
)
def test_a_wrong_flag_is_refused(benchmark, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse(wrong)
    assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_the_wire_limit_is_that_of_all_parameters_in_float32(benchmark):
    assert benchmark.wire_limit_s(100.0) == pytest.approx(1.97, abs=0.005)
    assert benchmark.wire_limit_s(20.0) == pytest.approx(9.86, abs=0.005)


def test_the_first_exchange_does_not_count_and_utilisation_is_the_share_of_inner_steps(benchmark):
    measured = result(benchmark, exchange_s=5.0)
    assert measured.step_s == 0.5 and measured.stall_s == pytest.approx(5.0)
    assert measured.utilisation == pytest.approx(10.0 / 15.0)
    assert measured.loss == 5.0


def test_finished_runs_are_read_back_and_not_run_again(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "prepare_corpus", lambda folder: folder.mkdir())
    executed = []
    monkeypatch.setattr(
        benchmark, "execute", lambda run, folder: executed.append(run) or result(benchmark, 1.0)
    )
    results = tmp_path / "results.jsonl"
    arguments = benchmark.parse(["--results", str(results), "--repeats", "1"])
    first = benchmark.measure(arguments)
    assert executed == list(first) == benchmark.plan(arguments)
    more = benchmark.parse(["--results", str(results), "--repeats", "2"])
    again = benchmark.measure(more)
    assert len(executed) == len(again) == 14 and {run.repeat for run in executed[7:]} == {1}
    assert {run: again[run] for run in first} == first


def test_the_report_sets_each_figure_beside_what_it_is_measured_against(benchmark, capsys):
    arguments = benchmark.parse(["--repeats", "1", "--rates", "100"])
    figures = {
        ("torchft", 100.0): 4.7,
        ("plain", 100.0): 2.0,
        ("streaming", 0.0): 0.0,
        ("streaming", 100.0): 0.1,
    }
    losses = {"streaming": 5.05}
    results = {
        run: result(benchmark, figures[run.arm, run.rate_mbit], losses.get(run.arm, 5.0))
        for run in benchmark.plan(arguments)
    }
    benchmark.report(arguments, ["--repeats", "1"], results)
    said = capsys.readouterr().out
    assert "command: python benchmarks/wan.py --repeats 1" in said
    found = [" ".join(row.split()) for row in said.splitlines()]

    def shows(arm: str, figure: str, value: str) -> bool:
        return any(row.startswith(f"{arm} {figure} {value} ") for row in found)

    assert "100 Mbit/s, on which an fp32 exchange takes 1.97 s at least" in said
    assert shows("torchft", "s without training, an exchange", "4.700")
    assert shows("torchft", "utilisation, %", "68.027")
    assert shows("torchft", "s without training, over the wire limit", "2.383")
    assert shows("plain", "s from offer to outcome, over the wire limit", "0.913")
    assert shows("streaming", "wall time, over that with an unlimited link", "1.002")
    assert shows("streaming", "final loss, over plain's", "1.010")
