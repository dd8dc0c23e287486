"""Stop signals of a command that must not be torn apart: counted from before its imports until its end.

A KeyboardInterrupt that falls into the import of an extension module can be lost in it; a count cannot. Imports nothing slow.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


class StopRequests:
    """Counts the stop signals this process received: one means drain, two mean kill.

    Signals within `MERGED_S` of one another are one request: `timeout` and terminals signal a process and its group.
    """

    MERGED_S = 1.0

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._now = now
        self._last = -float("inf")
        self._interrupts = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose. An ignored SIGINT is only what shells do to background jobs.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: self.receive())

    def receive(self) -> None:
        if self._now() - self._last > self.MERGED_S:
            self.count += 1
            self._last = self._now()
        if self._interrupts:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a request: for places where nothing has been started yet."""
        if self.count:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Around what takes long and cleans up behind itself: a request ends it at once, by KeyboardInterrupt."""
        self._interrupts = True
        try:
            self.check()
            yield
        finally:
            self._interrupts = False
        self.check()


@cache
def stop_requests() -> StopRequests:
    """Those of this process, counted since the first call."""
    requests = StopRequests()
    requests.install()
    return requests


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the command as Ctrl-C does: it cleans up and says so, instead of dying where it stands.

    Once only: what a command does to clean up is not interrupted by a second signal of the same kind. Main thread only.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # nohup ignores SIGHUP on purpose.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
