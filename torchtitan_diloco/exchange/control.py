"""The control path between gateways: small JSON messages and versioned state over short HTTP requests.

Separate sockets from the bulk, so a header never queues behind parameters. Served by a thread of its own; reads only
copies, so the training thread never waits for a reader.
"""

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchtitan_diloco.exchange.chunks import Chunks, Unreachable
from torchtitan_diloco.exchange.hedge import LINES
from torchtitan_diloco.exchange.messages import Message, from_json, to_json
from torchtitan_diloco.hub.bulk import chunk_of
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.listening import bind, url_of
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)

SHELVED = 2  # published states kept at most: the last, and the one before while somebody reads it
MESSAGE_LIMIT = 1 << 20  # bytes; a header names every stream the island has read, some 20 bytes each
PEER_TIMEOUT_S = 10.0  # one request to a peer
BUSY_S = 5.0  # how long the exchange may take over a question
IDLE_S = 60.0
"""How long an unused connection to a peer is kept: a new one costs a slot a round trip, but firewalls forget old ones."""
STREAMS = 4  # connections to the island whose state is taken
RUN_HEADER = "x-diloco-run"


class ControlServer:
    """Serves this island's messages, settings and outer state to its peers.

    first_with: asks the exchange for the first slot that a member may take part in, which may take it a while.
    """

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        settings: dict[str, Any],
        deliver: Callable[[Member, Message], None],
        first_with: Callable[[Member], Future[int]],
    ) -> None:
        self._run_id = run_id
        self._settings = settings
        self._deliver = deliver
        self._first_with = first_with
        self._lock = threading.Lock()
        self._shelf: dict[str, OuterState] = {}
        # When a state on the shelf was last asked for, or a piece of it sent.
        self._read: dict[str, float] = {}
        self.step = 0  # of run progress
        sock = bind(host, port)
        self.port: int = sock.getsockname()[1]
        self.url = url_of(host, self.port)
        app = Starlette(
            routes=[
                Route("/message", self._message, methods=["POST"]),
                Route("/settings", self._get_settings),
                Route("/first", self._first),
                Route("/state", self._state),
                Route("/state/{key}/done", self._done, methods=["POST"]),
                Route("/state/{key}/{name}", self._tensor),
            ]
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            # Longer than the sender's, so that no message meets a connection that is being closed.
            timeout_keep_alive=int(1.5 * IDLE_S),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [sock]}, daemon=True, name="control"
        )
        self._thread.start()
        self._sock = sock

    def publish(self, state: OuterState) -> None:
        with self._lock:
            self._shelf.pop(str(state.slot), None)
            self._shelf[str(state.slot)] = state.copy()
            *earlier, last = self._shelf
            # Without it, whoever reads it has to begin its heal again; of several, the one that was begun first goes on.
            now = time.monotonic()
            read = [key for key in earlier if now - self._read.get(key, float("-inf")) <= PEER_TIMEOUT_S]
            kept = read[: SHELVED - 1]
            self._shelf = {key: self._shelf[key] for key in (*kept, last)}
            self._read = {key: at for key, at in self._read.items() if key in self._shelf}

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._sock.close()

    def _refused(self, request: Request) -> Response | None:
        if request.headers.get(RUN_HEADER) != self._run_id:
            return JSONResponse({"error": f"this island belongs to run {self._run_id}"}, status_code=409)
        return None

    async def _message(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if int(request.headers.get("content-length", MESSAGE_LIMIT + 1)) > MESSAGE_LIMIT:
            return JSONResponse({"error": f"a message is at most {MESSAGE_LIMIT} bytes"}, status_code=413)
        try:
            body = json.loads(await request.body())
            sender = Member(int(body["island"]), str(body["incarnation"]))
            message = from_json(body["message"])
        except (ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        self._deliver(sender, message)
        return JSONResponse({})

    async def _get_settings(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse(self._settings)

    async def _first(self, request: Request) -> Response:
        """The first slot that is not decided without who asks; 503 while the exchange is busy."""
        if refused := self._refused(request):
            return refused
        try:
            member = Member(int(request.query_params["island"]), request.query_params["incarnation"])
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": f"no member: {error}"}, status_code=400)
        try:
            slot = await asyncio.wait_for(asyncio.wrap_future(self._first_with(member)), BUSY_S)
        except TimeoutError:
            return JSONResponse({"error": "it is merging"}, status_code=503)
        return JSONResponse({"slot": slot})

    async def _state(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        with self._lock:
            if not self._shelf:
                return JSONResponse({"error": "no state yet"}, status_code=404)
            key, state = list(self._shelf.items())[-1]
            self._read[key] = time.monotonic()
            step = self.step
        return JSONResponse(
            {"key": key, "step": step, "state": state.describe(), "tensors": sorted(state.tensors())}
        )

    async def _done(self, request: Request) -> Response:
        """Who has read this state has what it wanted; it keeps memory of versions that are past."""
        if refused := self._refused(request):
            return refused
        with self._lock:
            self._read.pop(request.path_params["key"], None)
        return JSONResponse({})

    async def _tensor(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        key, name = request.path_params["key"], request.path_params["name"]
        with self._lock:
            state = self._shelf.get(key)
            self._read[key] = time.monotonic()
        tensor = state.tensors().get(name) if state else None
        if tensor is None:
            return JSONResponse({"error": f"{name} of slot {key} is no longer held"}, status_code=410)
        try:
            return chunk_of(request, tensor.view(torch.uint8))
        except Refusal as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=400)


class Outbox:
    """Sends control messages to peers without blocking: over a few connections to each, in about the order they come.

    Where bulk fills the link a packet may be lost, and what waited behind it on that connection would come late with it.
    A message that cannot be delivered is dropped; the protocol says everything again until it is answered.
    """

    def __init__(self, me: Member, run_id: str, timeout_s: float) -> None:
        self._me = me
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._queues: dict[Member, queue.Queue[tuple[str, Message] | None]] = {}

    def send(self, to: Member, url: str, message: Message) -> None:
        if to not in self._queues:
            self._queues[to] = queue.Queue()
            for _ in range(LINES):
                name = f"to-island-{to.island}"
                threading.Thread(target=self._run, args=(to,), daemon=True, name=name).start()
        self._queues[to].put((url, message))

    def _run(self, to: Member) -> None:
        waiting = self._queues[to]
        # trust_env off: peers of this transport are reached directly, never through a site's web proxy.
        with httpx.Client(
            timeout=self._timeout_s,
            trust_env=False,
            headers={RUN_HEADER: self._run_id},
            limits=httpx.Limits(keepalive_expiry=IDLE_S),
        ) as client:
            while (item := waiting.get()) is not None:
                url, message = item
                body = {
                    "island": self._me.island,
                    "incarnation": self._me.incarnation,
                    "message": to_json(message),
                }
                try:
                    client.post(f"{url}/message", json=body).raise_for_status()
                except httpx.HTTPError as error:
                    logger.debug("message to island %d lost: %s", to.island, error)
                finally:
                    waiting.task_done()
            waiting.task_done()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was sent or dropped; False if that took longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while any(q.unfinished_tasks for q in self._queues.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        for waiting in self._queues.values():
            for _ in range(LINES):
                waiting.put(None)


class PeerClient:
    """Reads settings and outer state of a peer. Raises httpx.HTTPError when it cannot, ValueError when it is malformed."""

    def __init__(self, url: str, run_id: str, timeout_s: float) -> None:
        """timeout_s: without a byte of an answer."""
        self._client = httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, headers={RUN_HEADER: run_id}
        )
        self._chunks = Chunks(STREAMS, "heal")
        self._key = ""

    def __enter__(self) -> "PeerClient":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self._key and kind is None:  # else it may be gone on with
            with suppress(httpx.HTTPError):
                self._client.post(f"/state/{self._key}/done")
        self._chunks.close()
        self._client.close()

    def _get(self, path: str, **query: int | str) -> httpx.Response:
        response = self._client.get(path, params=query)
        response.raise_for_status()
        return response

    def settings(self) -> dict[str, Any]:
        return dict(self._get("/settings").json())

    def state(self) -> dict[str, Any]:
        found = dict(self._get("/state").json())
        self._key = str(found["key"])
        return found

    def first_with(self, member: Member) -> int | None:
        """The first slot of the peer that ``member`` may take part in; None when it is busy, and does not know yet."""
        try:
            reply = self._get("/first", island=member.island, incarnation=member.incarnation)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 503:
                return None
            raise
        return int(reply.json()["slot"])

    def fetch(self, key: str, name: str, into: Upload) -> None:
        """What is missing of a tensor of a published state. Raises Unreachable; what has come stays."""
        path = f"/state/{key}/{name}"

        def request(start: int, size: int) -> httpx.Response:
            try:
                return self._get(path, offset=start, size=size)
            except httpx.HTTPError as error:
                raise Unreachable(f"{self._client.base_url}: {str(error) or type(error).__name__}") from error

        self._chunks.fetch(path, into, request, lambda size: None)
