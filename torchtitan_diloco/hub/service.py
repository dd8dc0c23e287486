"""The hub over HTTP/1.1: short requests, which may all be said again. Starlette and uvicorn do the protocol.

Every request names run, island and incarnation in its headers, and every answer the hub's epoch. Bulk travels as chunks
with a checksum, over as many connections as the island likes.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import xxhash
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchtitan_diloco.hub.hub import Hello, Hub
from torchtitan_diloco.hub.refusal import Kind, Refusal
from torchtitan_diloco.hub.store import Fenced
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.policy import Header, Member

logger = logging.getLogger(__name__)

RUN, ISLAND, INCARNATION = "x-diloco-run", "x-diloco-island", "x-diloco-incarnation"
EPOCH, CHECKSUM = "x-diloco-epoch", "x-diloco-xxh3"
STATUS: dict[Kind, int] = {"malformed": 400, "stranger": 401, "refused": 409, "gone": 410}
MESSAGE_LIMIT = 4 << 20  # bytes; a header names every stream that the island has read
CHUNK_LIMIT = 16 << 20  # bytes of bulk in one request
LONGEST_POLL_S = 20.0  # proxies cut connections that are silent for longer
TICK_S = 0.25

Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """The ASGI application. All calls of the hub are made in the event loop, merges in a thread beside it."""

    def __init__(self, hub: Hub, run_id: str, stop: Callable[[BaseException], None]) -> None:
        """stop: is told what makes it impossible to go on."""
        self.hub, self._run_id, self._stop = hub, run_id, stop
        self._merging = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs in the event loop for as long as the service does."""
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/join", self._join),
            ("POST", "/admit", self._admit),
            ("POST", "/beat", self._beat),
            ("POST", "/leave", self._leave),
            ("GET", "/state", self._state),
            ("GET", "/state/{key}/{name}", self._tensor),
            ("PUT", "/state/{name}", self._bring),
            ("POST", "/slots/{slot:int}/header", self._header),
            ("PUT", "/slots/{slot:int}/payload", self._upload),
            ("GET", "/slots/{slot:int}/outcome", self._outcome),
            ("GET", "/slots/{slot:int}/result", self._result),
            ("POST", "/slots/{slot:int}/withdraw", self._withdraw),
        ]
        self.app = Starlette(
            routes=[
                Route(path, partial(self._answer, handler), methods=[how]) for how, path, handler in routes
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        running = [asyncio.create_task(call()) for call in (self._tick, *self.beside)]
        yield
        for task in running:
            task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for seat in self.hub.tick():
                logger.warning("island %d is gone: %s", seat.member.island, seat.why)
            await self._changed()

    # ---- every request ---------------------------------------------------------------------------------------------

    async def _answer(self, handler: Handler, request: Request) -> Response:
        try:
            if request.headers.get(RUN) != self._run_id:
                raise Refusal("refused", f"this hub serves run {self._run_id}")
            response = await handler(request)
        except Refusal as refusal:
            response = JSONResponse(
                {"error": str(refusal), "kind": refusal.kind}, status_code=STATUS[refusal.kind]
            )
        except ClientDisconnect:
            response = Response(status_code=400)
        except Fenced as fenced:
            self._stop(fenced)
            response = JSONResponse({"error": str(fenced), "kind": "fenced"}, status_code=503)
        response.headers[EPOCH] = str(self.hub.store.epoch)
        return response

    def _member(self, request: Request) -> Member:
        try:
            return Member(int(request.headers[ISLAND]), request.headers[INCARNATION])
        except (KeyError, ValueError):
            raise Refusal("malformed", f"the headers {ISLAND} and {INCARNATION} say who asks") from None

    async def _body(self, request: Request, limit: int) -> bytes:
        """All of it, or nothing: a body that was cut off is none. Raises Refusal."""
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > limit:
            raise Refusal(
                "malformed", f"a body of this request says its length, which is at most {limit} bytes"
            )
        body = await request.body()
        if len(body) != int(length):
            raise Refusal("malformed", f"the body ends after {len(body)} of {length} bytes")
        return body

    async def _json(self, request: Request) -> dict[str, Any]:
        try:
            data = json.loads(await self._body(request, MESSAGE_LIMIT))
        except (ValueError, RecursionError) as error:
            raise Refusal("malformed", f"the body is no JSON: {error}") from None
        if not isinstance(data, dict):
            raise Refusal("malformed", "the body is no JSON object")
        return data

    async def _changed(self) -> None:
        """Something has happened in the hub: start what it can do now, and tell those who wait."""
        job = self.hub.take_job()
        if job is not None:
            task = asyncio.create_task(self._merge(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        async with self._news:
            self._news.notify_all()

    async def _merge(self, job: Any) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._merging, job.run)
            self.hub.done(job)
        except BaseException as error:  # noqa: BLE001 - nothing goes on without it
            self._stop(error)
            return
        await self._changed()

    # ---- coming and going ------------------------------------------------------------------------------------------

    async def _join(self, request: Request) -> Response:
        member, data = self._member(request), await self._json(request)
        try:
            terms = Terms.from_json({**data["terms"], "run_id": self._run_id})
            state = described(data["state"], len(terms.sizes))
            hello = Hello(member, float(data["started"]), terms, int(data["step"]), state)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Refusal("malformed", f"not a hello: {error!r}") from None
        reply = self.hub.join(hello)
        await self._changed()
        return JSONResponse(reply)

    async def _admit(self, request: Request) -> Response:
        data = await self._json(request)
        reply = self.hub.admit(self._member(request), natural(data, "slot"))
        await self._changed()
        return JSONResponse(reply)

    async def _beat(self, request: Request) -> Response:
        data = await self._json(request)
        idle = data.get("idle_s")
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 <= idle < 1e9:
            raise Refusal("malformed", f"idle_s is {idle!r}")
        self.hub.beat(self._member(request), natural(data, "step"), natural(data, "slot"), float(idle))
        return JSONResponse({})

    async def _leave(self, request: Request) -> Response:
        data = await self._json(request)
        self.hub.leave(self._member(request), str(data.get("reason")))
        await self._changed()
        return JSONResponse({})

    # ---- state -----------------------------------------------------------------------------------------------------

    async def _state(self, request: Request) -> Response:
        self._member(request)
        return JSONResponse(self.hub.shelve())

    async def _tensor(self, request: Request) -> Response:
        self._member(request)
        tensor = self.hub.shelf.tensor(request.path_params["key"], request.path_params["name"])
        return chunk_of(request, tensor.view(torch.uint8))

    async def _bring(self, request: Request) -> Response:
        return await self._take(
            request, lambda: self.hub.bring(self._member(request), request.path_params["name"])
        )

    async def _take(self, request: Request, where: Callable[[], Upload]) -> Response:
        """A chunk of bulk. Nothing of it is kept unless all of it is here and right."""
        offset = query(request, "offset")
        where()  # refused before the body is read
        chunk = await self._body(request, CHUNK_LIMIT)
        if xxhash.xxh3_64_hexdigest(chunk) != request.headers.get(CHECKSUM):
            raise Refusal("malformed", f"the chunk at {offset} does not match its checksum")
        try:
            where().write(offset, chunk)  # asked again: it may have been settled while the body came
        except ValueError as error:
            raise Refusal("malformed", str(error)) from None
        return JSONResponse({})

    # ---- slots -----------------------------------------------------------------------------------------------------

    async def _header(self, request: Request) -> Response:
        slot, data = request.path_params["slot"], await self._json(request)
        try:
            header = Header.from_json(data)
            if header.slot != slot:
                raise ValueError(f"it is of slot {header.slot}")
        except (ValueError, TypeError) as error:
            raise Refusal("malformed", f"not a header: {error}") from None
        reply = self.hub.announce(self._member(request), header)
        await self._changed()
        return JSONResponse(reply)

    async def _upload(self, request: Request) -> Response:
        where = partial(
            self.hub.upload, self._member(request), request.path_params["slot"], query(request, "of")
        )
        response = await self._take(request, where)
        await self._changed()
        return response

    async def _outcome(self, request: Request) -> Response:
        """Answers at once when the slot is settled or waits for this island, else when it is, or after a while."""
        member, slot = self._member(request), request.path_params["slot"]
        seconds = min(query(request, "wait"), LONGEST_POLL_S)
        outcome = lambda: self.hub.outcome(member, slot)
        deadline = asyncio.get_running_loop().time() + seconds
        while (reply := outcome())["status"] == "open" and not reply["missing"]:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            async with self._news:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        return JSONResponse(reply)

    async def _result(self, request: Request) -> Response:
        return chunk_of(request, self.hub.payload(self._member(request), request.path_params["slot"]))

    async def _withdraw(self, request: Request) -> Response:
        reply = self.hub.withdraw(self._member(request), request.path_params["slot"])
        await self._changed()
        return JSONResponse(reply)


def chunk_of(request: Request, data: torch.Tensor) -> Response:
    """The bytes ``offset`` to ``offset + size``, with their checksum. Raises Refusal."""
    offset, size = query(request, "offset"), query(request, "size")
    if not 0 < size <= CHUNK_LIMIT or offset + size > data.numel():
        raise Refusal("malformed", f"{size} bytes from {offset} of {data.numel()} are none, or too many")
    chunk = data.numpy().data[offset : offset + size].tobytes()
    return Response(
        chunk, media_type="application/octet-stream", headers={CHECKSUM: xxhash.xxh3_64_hexdigest(chunk)}
    )


def query(request: Request, name: str) -> int:
    """Raises Refusal unless it is a natural number."""
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Refusal("malformed", f"{name} is {text!r}")
    return int(text)


def natural(data: dict[str, Any], name: str) -> int:
    """Raises Refusal unless it is a natural number."""
    value = data.get(name)
    if type(value) is not int or value < 0:
        raise Refusal("malformed", f"{name} is {value!r}")
    return value


def described(state: Any, fragments: int) -> dict[str, Any]:
    """A description as ``OuterState.describe`` gives it. Raises ValueError or TypeError."""
    entries = state["fragments"]
    if len(entries) != fragments:
        raise ValueError(f"a state of {len(entries)} fragments, where the run has {fragments}")
    for entry in entries:
        for name, kind in (("version", int), ("tokens", int), ("lineage", str), ("digest", str)):
            if type(entry[name]) is not kind:
                raise ValueError(f"{name} is {entry[name]!r}")
    if type(state["slot"]) is not int or not isinstance(state["positions"], dict):
        raise ValueError("slot or positions of the state are malformed")
    if not isinstance(state["members"], dict):
        raise ValueError("members of the state are malformed")
    return dict(state)
