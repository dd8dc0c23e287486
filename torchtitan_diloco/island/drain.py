"""The request to stop early: signal handlers only set a flag, the training loop looks at it between inner steps."""

import signal
import threading
from types import FrameType


class DrainFlag:
    """Set by SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 of this process."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def install(self) -> None:
        """Take over the signals. Main thread only."""
        for number in self.SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._event.set()

    def request(self, reason: str) -> None:
        self.reason = reason
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()
