"""Short questions that must not wait for a packet: said again over another connection while the first has no answer."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from torchtitan_diloco.exchange.chunks import Unreachable

LINES = 4
AFTER_S = 0.15

Line = TypeVar("Line")
Answer = TypeVar("Answer")


class Hedge(Generic[Line]):
    """Hedged requests (Dean and Barroso, The Tail at Scale, 2013).

    Where bulk fills a link, packets are lost, and each that is lost again doubles TCP's wait: seconds after a few. Another
    connection has its own clock. lines: one connection each; they take turns, so that all of them stay open. after_s: how
    long an answer may take until the question is asked again.
    """

    def __init__(self, lines: Iterable[Line], after_s: float = AFTER_S) -> None:
        self._after_s = after_s
        self._idle: queue.SimpleQueue[Line] = queue.SimpleQueue()
        for line in lines:
            self._idle.put(line)

    def ask(self, question: Callable[[Line], Answer]) -> Answer:
        """The first answer. question: may be asked several times, and ends by itself; Unreachable counts as no answer.

        Raises Unreachable when no line has brought one, and whatever else ``question`` raises.
        """
        answers: queue.SimpleQueue[Future[Answer]] = queue.SimpleQueue()
        line: Line | None = self._idle.get()
        asked = 0
        while True:
            if line is not None:
                words = (question, line, answers)
                threading.Thread(target=self._once, args=words, daemon=True, name="hedge").start()
                asked += 1
            line = None
            try:
                answer = answers.get(timeout=self._after_s)
            except queue.Empty:
                with contextlib.suppress(queue.Empty):
                    line = self._idle.get_nowait()
                continue
            asked -= 1
            if not isinstance(answer.exception(), Unreachable) or not asked:
                return answer.result()

    def _once(
        self, question: Callable[[Line], Answer], line: Line, answers: "queue.SimpleQueue[Future[Answer]]"
    ) -> None:
        answer: Future[Answer] = Future()
        try:
            answer.set_result(question(line))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            answer.set_exception(error)
        self._idle.put(line)
        answers.put(answer)
