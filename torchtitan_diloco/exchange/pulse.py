"""Notices that this process stood still: stopped by a signal, suspended with its machine, or starved of its processor."""

import threading
import time
from collections.abc import Callable

BEAT_S = 0.2


class Pulse:
    """A thread that does nothing but beat.

    limit_s: a pause that counts. on_gap: called after it, with its seconds, from that thread. clock and wait (which returns
    whether to end) are given in tests.
    """

    def __init__(
        self,
        limit_s: float,
        on_gap: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._limit_s, self._on_gap, self._clock = limit_s, on_gap, clock
        self._at = float("inf")  # of the last beat
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True, name="pulse").start()

    def run(self) -> None:
        self._at = self._clock()
        while not self._wait(BEAT_S):
            now = self._clock()
            if now - self._at >= self._limit_s:
                self._on_gap(now - self._at)
            self._at = now

    def stopped(self) -> bool:
        """Whether it is that long since the last beat: whoever runs again first need not wait until the pulse does."""
        return not self._stop.is_set() and self._clock() - self._at >= self._limit_s

    def stop(self) -> None:
        self._stop.set()
