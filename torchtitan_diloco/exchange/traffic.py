"""What each open slot has put on the network."""

import threading
import time
from collections.abc import Callable

QUIET_S = 5.0  # a pause in a transfer that is worth a word


class Moving:
    """How far a transfer of ``total`` bytes has come; in words, in MB (1e6 bytes) and MB/s. before: how many were there."""

    def __init__(self, total: int, before: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.moved = total, before
        self._before, self._clock = before, clock
        self._began = self._last = clock()

    def reach(self, moved: int) -> None:
        """So much of it is there by now."""
        if moved > self.moved:
            self.moved, self._last = moved, self._clock()

    def __str__(self) -> str:
        words = f"{self.moved / 1e6:.1f} of {self.total / 1e6:.1f} MB"
        if self._last > self._began:
            words += f" at {(self.moved - self._before) / 1e6 / (self._last - self._began):.2f} MB/s"
        quiet = self._clock() - self._last
        return words + (f", nothing for {quiet:.0f} s" if self.moved < self.total and quiet > QUIET_S else "")


class Traffic:
    """Payload bytes by slot, from its offer to its end, those of broken attempts included. Thread-safe.

    Headers of TCP and IP and the control messages of a slot (about 1 KB each) are not in it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}  # slot -> bytes sent, bytes received
        self._moving: dict[
            int, tuple[Moving, int]
        ] = {}  # slot -> its latest transfer, bytes moved before that

    def open(self, slot: int) -> None:
        with self._lock:
            self._open[slot] = [0, 0]

    def expect(self, slot: int, total: int) -> None:
        """A transfer begins that moves ``total`` bytes, both ways together."""
        with self._lock:
            if slot in self._open:
                self._moving[slot] = (Moving(total, clock=self._clock), sum(self._open[slot]))

    def add(self, slot: int, sent: int = 0, received: int = 0) -> None:
        """A slot that is not open is none of ours any more: an attempt that was given up may come to its end late."""
        with self._lock:
            if slot in self._open:
                self._open[slot][0] += sent
                self._open[slot][1] += received
                if slot in self._moving:
                    moving, before = self._moving[slot]
                    moving.reach(sum(self._open[slot]) - before)

    def progress(self, slot: int | None) -> str:
        """How far the slot's latest transfer has come, in words; "" where there is none."""
        with self._lock:
            return str(self._moving[slot][0]) if slot in self._moving else ""

    def close(self, slot: int) -> tuple[int, int]:
        """Bytes (sent, received)."""
        with self._lock:
            self._moving.pop(slot, None)
            sent, received = self._open.pop(slot)
            return sent, received
