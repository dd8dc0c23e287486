"""The benchmarks of an exchange: their command lines, their tensor list, and the arithmetic between clock and verdict."""

import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def exchange(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import exchange

    return exchange


@pytest.fixture
def paced(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import exchange_paced

    return exchange_paced


def test_its_tensors_are_those_of_a_model_of_50_million_parameters(exchange):
    tensors = exchange.Shape().tensors()
    assert len(tensors) == 199
    assert sum(map(math.prod, tensors.values())) == pytest.approx(50e6, rel=1e-3)
    small = exchange.Shape(dim=8, hidden=16, layers=2, vocabulary=11)
    found = {name: tuple(p.shape) for name, p in small.model().named_parameters()}
    assert found == small.tensors()


@pytest.mark.parametrize("wrong", [["--wire", "fp32,morse"], ["--pairs", "0"], ["--layers", "x"], ["--fast"]])
def test_a_wrong_flag_is_refused(exchange, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        exchange.parse(wrong)
    assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--pace", "0"], ["--window", "0"], ["--wire"]])
def test_a_wrong_flag_of_the_paced_one_is_refused(paced, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        paced.parse(wrong)
    assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_parts_and_the_rest_make_up_the_median_slot(exchange):
    slots = [exchange.Slot(wall, 1.0, 10, {"wire": wall / 2, "digest": 0.1}) for wall in (1.0, 2.0, 6.0)]
    assert exchange.median_parts(slots) == pytest.approx({"wire": 1.0, "digest": 0.1, "everything else": 0.9})


def test_the_cost_is_cpu_seconds_over_megabytes(exchange):
    slots = [exchange.Slot(9.0, cpu, 50_000_000, {}) for cpu in (0.5, 1.0, 9.0)]
    assert exchange.cost(slots) == pytest.approx(0.02)


def test_the_verdict_is_the_intervals(exchange):
    assert exchange.judge(0.5, 0.69, 0.7) == "met"
    assert exchange.judge(0.71, 0.8, 0.7) == "MISSED"
    assert exchange.judge(0.6, 0.8, 0.7).startswith("not resolved")


def test_a_part_is_counted_in_every_thread_and_when_it_fails(exchange, monkeypatch):
    import exchange_sides

    class Machine:
        def work(self, x: int) -> int:
            return 6 // x

    clock = exchange_sides.Clock()
    monkeypatch.setattr(Machine, "work", Machine.work)
    clock.watch(Machine, "work", "work")
    assert Machine().work(2) == 3
    once = clock.spent["work"]
    with pytest.raises(ZeroDivisionError):
        Machine().work(0)
    assert clock.spent["work"] > once > 0


@pytest.mark.parametrize(
    ("exchanging", "cpu", "says"),
    [
        ([10.1, 10.2, 10.3], 6.0, ["slow-down: 2.00 %", "met"]),
        ([11.0, 11.1, 11.2], 6.0, ["MISSED"]),
        ([10.1, 10.2, 10.3], 10_000.0, ["void, choose a larger --pace"]),
    ],
)
def test_the_slow_down_of_a_window(paced, capsys, exchanging, cpu, says):
    paced.report(([10.0] * 3, exchanging), ([cpu] * 3, [cpu] * 3), 10.0)
    out = capsys.readouterr().out
    assert all(words in out for words in says)
    assert ("other programs" in out) is False


def test_windows_that_other_programs_hold_up_decide_nothing(paced, capsys):
    paced.report(([12.0] * 3, [12.1] * 3), ([6.0] * 3, [6.0] * 3), 10.0)
    assert "void, other programs hold the steps up" in capsys.readouterr().out
