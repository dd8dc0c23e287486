"""What an island that is to stop does about a hub that does not answer: it saves, and leaves without a word.

A slot that is given up here may be counted by the hub all the same. Its outcome is then that of an island that was killed
after it had sent: in the checkpoint the slot is still to come, and an island that joins takes from the hub whatever the hub
has committed, in place of what it had sent, so nothing counts twice.
"""

import logging
import threading
import time
from collections.abc import Callable

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.transport import Waiting
from torchtitan_diloco.hub.refusal import Refusal

logger = logging.getLogger(__name__)

GOODBYE_S = 3.0


class Doubt:
    """seconds: for the hub to say what becomes of all slots that are withdrawn; torchrun kills 30 s after its SIGTERM."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = seconds, now
        self._until: float | None = None

    def begin(self) -> None:
        """The island is to stop. Said again, it gives no more time."""
        if self._until is None:
            self._until = self._now() + self._seconds

    def give_up(self, slot: int, waiting: Waiting | None) -> Outcome | None:
        """The outcome of a slot that nothing is known of, once its time is over."""
        if self._until is None or self._now() < self._until:
            return None
        whom = f"{waiting.target} ({waiting.why})" if waiting is not None else "the hub"
        logger.warning(
            "slot %d is given up: waited %g s for %s to let this island leave it; should the hub have counted it, the "
            "island takes the hub's state when it comes back",
            slot, self._seconds, whom,
        )  # fmt: skip
        return Outcome(slot, "withdrawn", reason=f"asked to stop, and no word from {whom}")


def goodbye(say: Callable[[], object], to: str) -> None:
    """Say it, but stay no longer than ``GOODBYE_S``: whoever does not hear it finds out by itself."""

    def run() -> None:
        try:
            say()
        except (
            Unreachable,
            Refusal,
            UserError,
            RuntimeError,
        ) as error:  # the last: of what is closed meanwhile
            logger.debug("no goodbye: %s", error)

    thread = threading.Thread(target=run, daemon=True, name="hub-goodbye")
    thread.start()
    thread.join(GOODBYE_S)
    if thread.is_alive():
        logger.warning("left without a goodbye: waited %g s for %s", GOODBYE_S, to)
