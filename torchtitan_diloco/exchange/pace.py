"""A token bucket: keeps bulk traffic below a rate, so that it leaves room on a shared link and on the CPU."""

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets ``rate`` bytes per second through on average, and ``burst_s`` seconds' worth at once. Thread-safe.

    rate 0 means no limit. clock and sleep are given in tests.
    """

    def __init__(
        self,
        rate: float,
        burst_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._burst = rate * burst_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = self._burst
        self._at = clock()

    def take(self, size: int) -> None:
        """Wait until ``size`` bytes may go. More than a burst is let through in debt, which the next one waits for."""
        if self._rate <= 0:
            return
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
            wait = max(0.0, -self._level / self._rate)
            self._level -= size
        if wait > 0:
            self._sleep(wait)
