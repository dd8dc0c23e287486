"""Islands that share one process and one virtual clock: each in a thread of its own, one of them running at a time.

The production method blocks where it waits for an outcome; there it hands over to the next island. So whole methods run
against one another, every time in the same order.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.transport import Joined
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.semi_sync import diloco

PATIENCE_S = 100.0  # of virtual time, for a whole run
HEALS = 20  # as many are enough for any run
HAND_OVER_S = 0.02  # of virtual time, each


class Stuck(AssertionError):
    """The islands wait for one another without end."""


class Crashed(Exception):
    """The script has killed this island."""


class Turns:
    def __init__(self, net: MemoryNet) -> None:
        self.net = net
        self._mine = threading.local()
        self.heals = 0
        self._back = threading.Semaphore(0)

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run all calls to their end, in turns. Raises what one of them raises."""
        errors: list[BaseException] = []
        waiting = [threading.Semaphore(0) for _ in calls]
        running = dict(enumerate(waiting))

        def thread(number: int, call: Callable[[], None]) -> None:
            self._mine.turn = waiting[number]
            waiting[number].acquire()
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
            finally:
                del running[number]
                self._back.release()

        for number, call in enumerate(calls):
            threading.Thread(target=thread, args=(number, call), daemon=True).start()
        with mock.patch.object(diloco, "POLL_S", 0.001):  # in real time, after a heal that brought nothing
            while running:
                for turn in list(running.values()):
                    turn.release()
                    self._back.acquire()
                    if errors:
                        raise errors[0]

    def hand_over(self) -> None:
        """Let the others run, and a little virtual time pass. Outside of ``run`` only the latter."""
        if self.net.now > PATIENCE_S:
            raise Stuck("the run does not come to an end")
        turn = getattr(self._mine, "turn", None)
        if turn is not None:
            self._back.release()
            turn.acquire()
        self.net.run(HAND_OVER_S)


@dataclass(slots=True, eq=False)
class TurnsTransport(MemoryTransport):
    """Hands over where it waits, and once for every inner step."""

    turns: Turns = field(kw_only=True)

    def progress(self, step: int) -> None:
        MemoryTransport.progress(self, step)
        self._hand_over()

    def heal(self, state: OuterState) -> Joined:
        self.turns.heals += 1
        if self.turns.heals > HEALS:
            raise Stuck("the islands heal from one another without end")
        return MemoryTransport.heal(self, state)

    def result(self, slot: int, timeout_s: float) -> Outcome | None:
        if slot not in self.outcomes:
            self._hand_over()
        return MemoryTransport.result(self, slot, 0.0)

    def _hand_over(self) -> None:
        self.turns.hand_over()
        if self.net.nodes.get(self.me.island) is not self:
            raise Crashed(f"island {self.me.island}")
