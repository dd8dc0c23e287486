"""A network between islands and their hub that does to single requests what bad networks do."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

FAULTS = ("drop before", "drop after", "cut request", "cut answer", "duplicate", "delay", "late copy")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    head: bytes
    body: bytes


Decide = Callable[[Request], str]
"""Returns a fault, or "" to pass the request on. Called in the proxy's thread."""


def at_random(seed: int, share: float) -> Decide:
    """Each fault for that share of the requests."""
    random = Random(seed)

    def decide(request: Request) -> str:
        number = int(random.random() / share)
        return FAULTS[number] if number < len(FAULTS) else ""

    return decide


class HubProxy:
    """Listens on a port of its own. target: of the hub; may be changed while it runs. done: faults so far, by name."""

    def __init__(self, target: int, decide: Decide, seed: int = 0) -> None:
        self.target, self._decide, self._random = target, decide, Random(seed)
        self.done: Counter[str] = Counter()
        self.port = 0
        self._later: set[asyncio.Task[bytes]] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator["HubProxy"]:
        loop, up = asyncio.new_event_loop(), threading.Event()
        over = asyncio.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            up.set()
            await over.wait()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        thread = threading.Thread(
            target=lambda: loop.run_until_complete(serve()), daemon=True, name="hub-proxy"
        )
        thread.start()
        assert up.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join(10)
            loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(length_of(head))
                method, path, *_ = head.decode("latin-1").split(" ", 2)
                answer = await self._answer(Request(method, path, head, body))
                if answer is None:
                    break
                whole, cut = answer
                writer.write(whole)
                await writer.drain()
                if cut:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request) -> tuple[bytes, bool] | None:
        """The answer, and whether it is cut off after that; None: there is none."""
        fault = self._decide(request)
        self.done[fault or "none"] += 1
        whole = request.head + request.body
        if fault == "drop before":
            return None
        if fault == "cut request":
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._pass_on(whole[: len(whole) - max(1, len(request.body) // 2)], cut=True)
            return None
        if fault == "delay":
            await asyncio.sleep(self._random.uniform(0.05, 0.4))
        if fault in ("duplicate", "late copy"):
            copy = asyncio.create_task(
                self._pass_on(whole, self._random.uniform(0.2, 1.5) if fault == "late copy" else 0.0)
            )
            self._later.add(copy)
            copy.add_done_callback(self._over)
        answer = await self._pass_on(whole)
        if fault == "drop after":
            return None
        if fault == "cut answer":
            return answer[: len(answer) - max(1, length_of(answer) // 2)], True
        return answer, False

    def _over(self, copy: "asyncio.Task[bytes]") -> None:
        self._later.discard(copy)
        if not copy.cancelled():
            copy.exception()  # nobody waits for what came of it

    async def _pass_on(self, whole: bytes, after_s: float = 0.0, cut: bool = False) -> bytes:
        await asyncio.sleep(after_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            writer.write(whole)
            if cut:
                writer.write_eof()
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(length_of(head))
        finally:
            writer.close()


def length_of(message: bytes) -> int:
    """Of the body, as the head says."""
    for line in message.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
