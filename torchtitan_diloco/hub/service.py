"""The hub over HTTP/1.1: short requests, which may all be said again. Starlette and uvicorn do the protocol.

Every request names run, island and incarnation in its headers, and every answer the hub's epoch. Bulk travels as chunks
with a checksum, over as many connections as the island likes.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.hub.access import ISLANDS, OPERATORS, READERS, Access
from torchtitan_diloco.hub.bulk import body_of, chunk_of, problem, query, take_chunk
from torchtitan_diloco.hub.dial import EPOCH, INCARNATION, ISLAND, RUN
from torchtitan_diloco.hub.far import FarUpload, place_of
from torchtitan_diloco.hub.hub import Hub
from torchtitan_diloco.hub.refusal import Busy, Kind, Refusal
from torchtitan_diloco.hub.status import status_of
from torchtitan_diloco.hub.store import Fenced
from torchtitan_diloco.hub.terms import Hello, Terms
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.wellformed import LARGEST, described, message, natural, whole
from torchtitan_diloco.outer.policy import Header, Member

logger = logging.getLogger(__name__)

STATUS: dict[Kind, int] = {
    "malformed": 400, "stranger": 401, "forbidden": 403, "refused": 409, "gone": 410, "busy": 429,
}  # fmt: skip
MESSAGE_LIMIT = 4 << 20  # bytes; a header names every stream that the island has read
LONGEST_POLL_S = 20.0  # proxies cut connections that are silent for longer
TICK_S = 0.25

Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """The ASGI application. All calls of the hub are made in the event loop, merges in a thread beside it."""

    def __init__(
        self, hub: Hub, run_id: str, stop: Callable[[BaseException], None], access: Access | None = None
    ) -> None:
        """stop: is told what makes it impossible to go on."""
        self.hub, self._run_id, self._stop = hub, run_id, stop
        self._access = access or Access()
        self._merging = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs in the event loop for as long as the service does."""
        self.ending: Callable[[], bool] = lambda: False
        """Whether the server is about to end, so that nobody is kept waiting."""
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/join", self._join),
            ("POST", "/admit", self._admit),
            ("POST", "/beat", self._beat),
            ("POST", "/leave", self._leave),
            ("GET", "/state", self._state),
            ("GET", "/state/{key}/{name}", self._tensor),
            ("PUT", "/state/{name}", self._bring),
            ("POST", "/slots/{slot}/header", self._header),
            ("PUT", "/slots/{slot}/payload", self._upload),
            ("GET", "/slots/{slot}/outcome", self._outcome),
            ("GET", "/slots/{slot}/result", self._result),
            ("POST", "/slots/{slot}/withdraw", self._withdraw),
        ]
        others = [
            ("GET", "/status", self._status, READERS),
            ("POST", "/evict/{island:int}", self._evict, OPERATORS),
        ]
        self.app = Starlette(
            routes=[
                Route(path, partial(self._answer, handler, who), methods=[how])
                for how, path, handler, who in [*((*route, ISLANDS) for route in routes), *others]
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: self._no_endpoint},
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
            try:
                await self.hub.workshop.sync()
                for seat in self.hub.tick():
                    logger.warning("island %d is gone: %s", seat.member.island, seat.why)
                await self._changed()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - nothing goes on without it
                self._stop(error)
                return

    # ---- every request ---------------------------------------------------------------------------------------------

    async def _answer(self, handler: Handler, who: frozenset[str], request: Request) -> Response:
        try:
            headers, peer = request.headers, request.client.host if request.client else ""
            self._access.check(who, headers.get(ISLAND), headers.get("authorization"), peer)
            if who is ISLANDS and headers.get(RUN) != self._run_id:
                raise Refusal("refused", f"this hub serves run {self._run_id}")
            response = await handler(request)
        except Refusal as refusal:
            response = problem(str(refusal), refusal.kind, STATUS[refusal.kind])
            if isinstance(refusal, Busy):
                response.headers["retry-after"] = str(math.ceil(refusal.retry_s))
        except ClientDisconnect:
            response = problem("the request was cut off", "malformed", 400)
        except (Fenced, Resumable, UserError, OSError) as error:  # nothing can be made durable any more
            self._stop(error)
            response = problem(str(error), "broken", 503)
        response.headers[EPOCH] = str(self.hub.store.epoch)
        return response

    async def _no_endpoint(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"the hub has no {request.method} {request.url.path}"
        return problem(reason, "malformed", error.status_code, {EPOCH: str(self.hub.store.epoch)})

    async def _json(self, request: Request) -> dict[str, Any]:
        return message(await body_of(request, MESSAGE_LIMIT))

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
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - nothing goes on without it
            self._stop(error)
            return
        await self._changed()

    # ---- coming and going ------------------------------------------------------------------------------------------

    async def _join(self, request: Request) -> Response:
        member, data = member_of(request), await self._json(request)
        try:
            terms = Terms.from_json({**data["terms"], "run_id": self._run_id})
            state = described(data["state"], len(terms.sizes))
            started = data["started"]
            if type(started) not in (int, float) or not 0 <= started < LARGEST:
                raise ValueError(f"started is {started!r}")
            hello = Hello(
                member, float(started), terms, natural(data, "step"), state, data.get("overdue") is True
            )
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise Refusal("malformed", f"not a hello: {error!r}") from None
        reply = self.hub.join(hello)
        if "missing" in reply and self.hub.workshop.far:
            await self.hub.workshop.sync()
            reply = self.hub.join(hello)
            for name in reply.get("missing", ()):
                reply.setdefault("at", {})[name] = require_room(self.hub.bring(member, name)).place
        await self._changed()
        return JSONResponse(reply)

    async def _admit(self, request: Request) -> Response:
        data = await self._json(request)
        reply = self.hub.admit(member_of(request), natural(data, "slot"))
        await self._changed()
        return JSONResponse(reply)

    async def _beat(self, request: Request) -> Response:
        data = await self._json(request)
        idle = data.get("idle_s")
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 <= idle < 1e9:
            raise Refusal("malformed", f"idle_s is {idle!r}")
        member, step, slot = member_of(request), natural(data, "step"), natural(data, "slot")
        return JSONResponse(self.hub.beat(member, step, slot, float(idle)))

    async def _leave(self, request: Request) -> Response:
        data = await self._json(request)
        self.hub.leave(member_of(request), str(data.get("reason")))
        await self._changed()
        return JSONResponse({})

    async def _status(self, request: Request) -> Response:
        return JSONResponse({"run": self._run_id} | status_of(self.hub))

    async def _evict(self, request: Request) -> Response:
        island = request.path_params["island"]
        self.hub.evict(island)
        logger.warning("island %d is evicted", island)
        await self._changed()
        return JSONResponse({})

    # ---- state -----------------------------------------------------------------------------------------------------

    async def _state(self, request: Request) -> Response:
        reply = self.hub.shelve(member_of(request))
        places = {name: place_of(self.hub.shelf.tensor(reply["key"], name)) for name in reply["tensors"]}
        return JSONResponse(reply | {"at": {name: place for name, place in places.items() if place}})

    async def _tensor(self, request: Request) -> Response:
        member_of(request)
        tensor = self.hub.shelf.tensor(request.path_params["key"], request.path_params["name"])
        return chunk_of(request, here(tensor).view(torch.uint8))

    async def _bring(self, request: Request) -> Response:
        await take_chunk(request, lambda: self.hub.bring(member_of(request), request.path_params["name"]))
        return JSONResponse({})

    # ---- slots -----------------------------------------------------------------------------------------------------

    async def _header(self, request: Request) -> Response:
        slot, data = number_of(request), await self._json(request)
        try:
            header = Header.from_json(data)
            if header.slot != slot:
                raise ValueError(f"it is of slot {header.slot}")
            for name in ("island", "version", "tokens_total", "steps", "tokens"):
                natural(data, name)
        except (ValueError, TypeError) as error:
            raise Refusal("malformed", f"not a header: {error}") from None
        reply = self.hub.announce(member_of(request), header)
        await self._changed()
        return await self._told(member_of(request), slot, reply)

    async def _upload(self, request: Request) -> Response:
        where = partial(self.hub.upload, member_of(request), number_of(request), query(request, "of"))
        await take_chunk(request, where)
        await self._changed()
        return JSONResponse({})

    async def _outcome(self, request: Request) -> Response:
        """Answers at once when the slot is settled or waits for this island, else when it is, or after a while."""
        member, slot = member_of(request), number_of(request)
        seconds = min(query(request, "wait"), LONGEST_POLL_S)
        outcome = lambda: self.hub.outcome(member, slot)
        deadline = asyncio.get_running_loop().time() + seconds
        if self.hub.workshop.far:
            await self._learn(member, slot)
        while (reply := outcome())["status"] == "open" and not reply["missing"]:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self.ending():
                break
            async with self._news:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), min(left, 2 * TICK_S))
        return await self._told(member, slot, reply)

    async def _result(self, request: Request) -> Response:
        return chunk_of(request, here(self.hub.payload(member_of(request), number_of(request))))

    async def _withdraw(self, request: Request) -> Response:
        member, slot = member_of(request), number_of(request)
        reply = self.hub.withdraw(member, slot)
        await self._changed()
        return await self._told(member, slot, reply)

    async def _learn(self, member: Member, slot: int) -> dict[str, Any]:
        """How a slot stands, now that the worker has said what it has of this island's contribution. Raises Refusal."""
        reply = self.hub.outcome(member, slot)
        if reply["status"] == "open" and reply["missing"]:
            self.hub.upload(member, slot)  # the worker learns of it with this
            if await self.hub.workshop.sync():
                await self._changed()
            reply = self.hub.outcome(member, slot)
        return reply

    async def _told(self, member: Member, slot: int, reply: dict[str, Any]) -> Response:
        """How a slot stands, with the place at a worker, if there are any, where its bulk goes to or comes from."""
        if self.hub.workshop.far and reply["status"] == "open" and reply["missing"]:
            reply = await self._learn(member, slot)
            if reply["status"] == "open" and reply["missing"]:
                reply["at"] = require_room(self.hub.upload(member, slot)).place
        if self.hub.workshop.far and reply["status"] == "committed" and slot in self.hub.payloads:
            reply["at"] = place_of(self.hub.payloads[slot])
        return JSONResponse(reply)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Raises Refusal where a worker has it."""
    if place_of(tensor):
        raise Refusal("gone", "a worker has it; ask again where")
    return tensor


def require_room(upload: Upload) -> Upload:
    """Raises Refusal where a worker has no memory for it."""
    if isinstance(upload, FarUpload) and upload.refused:
        raise Refusal("refused", upload.refused)
    return upload


def member_of(request: Request) -> Member:
    """Who asks. Raises Refusal."""
    island, incarnation = request.headers.get(ISLAND, ""), request.headers.get(INCARNATION, "")
    if not 0 < len(incarnation) < 200:
        raise Refusal("malformed", f"the headers {ISLAND} and {INCARNATION} say who asks")
    return Member(whole(island, f"the header {ISLAND}"), incarnation)


def number_of(request: Request) -> int:
    """The slot. Raises Refusal."""
    return whole(request.path_params["slot"], "the slot")
