"""Waiting for the outside world with all ranks of an island present, so that none of them sits in a timed collective."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torchtitan_diloco.exchange.transport import Waiting
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.observe.events import Trace

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_S = 5.0  # a wait that lasts is reported this often


def wait_for(
    group: IslandGroup,
    trace: Trace,
    drain: DrainFlag,
    poll: Callable[[], T | None],
    *,
    waiting: Callable[[], Waiting | None],
    on_drain: Callable[[], None],
) -> T:
    """Poll on the gateway until there is a value, and give it to all ranks.

    poll: called on the gateway only; blocks for a fraction of a second at most; its value must be small. on_drain: called
    once on the gateway when some rank was asked to stop. Whatever poll raises is raised on every rank.
    """
    reported = time.monotonic()
    draining = False
    while True:
        message: tuple[str, Any] | None = None
        if group.is_gateway:
            try:
                value = poll()
                message = ("more", None) if value is None else ("done", value)
            except Exception as error:  # noqa: BLE001 - every rank must learn of it, or the others wait for ever
                message = ("error", error)
        kind, value = group.tell(message)
        if kind == "done":
            return value  # type: ignore[no-any-return]
        if kind == "error":
            raise value
        if not draining and group.any(drain.is_set()):
            draining = True
            if group.is_gateway:
                on_drain()
        if group.is_gateway and time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            state = waiting()
            if state is not None:
                report(trace, state)


def report(trace: Trace, waiting: Waiting) -> None:
    """Write down, and say, for whom the island waits."""
    trace.event("waiting", **{"for": waiting.target, "since": waiting.since, "why": waiting.why})
    logger.info("waiting since %.0f s for %s", time.time() - waiting.since, waiting)


def in_background(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Run a blocking call in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - handed to whoever reads the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=call.__name__).start()
    return future
