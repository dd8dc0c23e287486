"""An island that is to stop does not wait for a hub that is away."""

import threading
import time

import pytest

from torchtitan_diloco.exchange import doubt
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.transport import Waiting


def test_slots_are_given_up_once_the_time_is_over_and_it_is_said_for_whom_it_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = [100.0]
    mine = doubt.Doubt(5.0, lambda: clock[0])
    hub = Waiting("the hub at http://hub:1", 90.0, "connection refused")
    assert mine.give_up(3, hub) is None
    mine.begin()
    clock[0] += 4.0
    mine.begin()  # for the next slot: all of them have the same five seconds
    assert mine.give_up(3, hub) is None
    clock[0] += 1.0
    outcome = mine.give_up(3, hub)
    assert outcome is not None and (outcome.slot, outcome.status) == (3, "withdrawn")
    assert "waited 5 s for the hub at http://hub:1 (connection refused)" in caplog.text


def test_a_goodbye_that_nobody_takes_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doubt, "GOODBYE_S", 0.05)
    over = threading.Event()
    began = time.monotonic()
    doubt.goodbye(over.wait, "the hub at http://hub:1")
    assert time.monotonic() - began < 5.0
    assert "left without a goodbye: waited 0.05 s for the hub at http://hub:1" in caplog.text
    over.set()


def test_a_goodbye_that_is_refused_is_no_error() -> None:
    def say() -> None:
        raise Unreachable("gone")

    doubt.goodbye(say, "the hub")
