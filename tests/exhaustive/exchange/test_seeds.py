"""A seed that fails is named, whatever way it fails in."""

import os
import signal
import time
from collections import Counter
from functools import partial

import pytest

from tests.helpers.seeds import SeedFailed, run_seeds

REPLAY = "DILOCO_SEED={seed} DILOCO_SCHEDULES=1"


def one(how: str, at: int, seed: int) -> Counter[str]:
    if seed == at:
        if how == "raise":
            raise KeyError("no such thing")
        if how == "exit":
            raise SystemExit(3)
        if how == "die":
            signal.raise_signal(signal.SIGKILL)
        while how == "hang":
            pass
        if how == "wait":
            os.kill(os.getppid(), signal.SIGALRM)
            time.sleep(1000)
    return Counter(seeds=1, total=seed)


def test_every_seed_is_done_once():
    assert run_seeds(partial(one, "", -1), range(7, 30), REPLAY) == Counter(seeds=23, total=sum(range(7, 30)))


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raise", "KeyError: 'no such thing'"),
        ("exit", "SystemExit: 3"),
        ("die", "the process has died"),
        ("hang", "TimeoutError: not done after 0.5 s"),
    ],
)
def test_a_seed_that_goes_wrong_is_named(how, what):
    with pytest.raises(SeedFailed, match=f"DILOCO_SEED=18 DILOCO_SCHEDULES=1: {what}"):
        run_seeds(partial(one, how, 18), range(7, 30), REPLAY, seconds=0.5)


def test_a_time_out_of_the_whole_names_the_seeds_under_way():
    def late(*_: object) -> None:
        raise TimeoutError("the test's own")

    before = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(AssertionError, match=r"TimeoutError during .*DILOCO_SEED=18 .*the test's own"):
            run_seeds(partial(one, "wait", 18), range(7, 30), REPLAY)
    finally:
        signal.signal(signal.SIGALRM, before)
