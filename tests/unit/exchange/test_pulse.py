"""FR-39: a process that was frozen notices it by itself."""

from collections.abc import Iterator

from torchtitan_diloco.exchange.pulse import Pulse


def test_fr39_a_pause_as_long_as_the_limit_is_noticed_once_and_a_shorter_one_is_not() -> None:
    times = iter([0.0, 0.2, 1.9, 2.1, 5.0, 5.2])
    rest: Iterator[bool] = iter([False] * 5 + [True])
    gaps: list[float] = []
    Pulse(2.0, gaps.append, lambda: next(times), lambda seconds: next(rest)).run()
    assert gaps == [5.0 - 2.1]


def test_fr39_whoever_runs_first_after_a_pause_sees_it_before_the_pulse_does() -> None:
    now = [0.0]
    seen: list[bool] = []
    pulse = Pulse(2.0, lambda gap: None, lambda: now[0], lambda seconds: bool(seen))
    assert not pulse.stopped()  # it has not begun

    def wait(seconds: float) -> bool:
        for now[0] in (1.9, 2.0):
            seen.append(pulse.stopped())
        return True

    pulse._wait = wait
    pulse.run()
    assert seen == [False, True]
