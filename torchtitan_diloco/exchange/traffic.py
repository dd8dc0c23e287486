"""What each open slot has put on the network."""

import threading


class Traffic:
    """Payload bytes by slot, from its offer to its end, those of broken attempts included. Thread-safe.

    Headers of TCP and IP and the control messages of a slot (about 1 KB each) are not in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}  # slot -> bytes sent, bytes received

    def open(self, slot: int) -> None:
        with self._lock:
            self._open[slot] = [0, 0]

    def add(self, slot: int, sent: int = 0, received: int = 0) -> None:
        """A slot that is not open is none of ours any more: an attempt that was given up may come to its end late."""
        with self._lock:
            if slot in self._open:
                self._open[slot][0] += sent
                self._open[slot][1] += received

    def close(self, slot: int) -> tuple[int, int]:
        """Bytes (sent, received)."""
        with self._lock:
            sent, received = self._open.pop(slot)
            return sent, received
