"""What a request may cost before anybody looks at it: bodies are bounded before they are read, and each has its time."""

import asyncio
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0  # from a connection, or the first byte of a request, until all its headers are here
BODY_S = 300.0  # from then until its body is
HEADERS_LIMIT = 64 << 10  # bytes


class Bounds:
    """ASGI middleware. A body of unknown length, or a longer one than any request of ours has, is not read at all."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and (refused := self._refused(dict(scope["headers"]))):
            # The connection is closed as well, or what follows would be taken in after all.
            status, error = refused
            app = JSONResponse({"error": error, "kind": "malformed"}, status, headers={"connection": "close"})
        await app(scope, receive, send)

    def _refused(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if b"transfer-encoding" in headers:
            return 411, "a body has to come with its length, not in chunks"
        length = headers.get(b"content-length", b"0")
        if len(length) > 18 or int(length) > self._limit:
            return 413, f"a body has at most {self._limit} bytes"
        return None


class PatientProtocol(H11Protocol):
    """uvicorn's, which would wait for ever for who sends a request byte by byte, or not at all."""

    headers_s, body_s = HEADERS_S, BODY_S

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._enter("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        self._enter("headers" if begun else "body" if state is h11.SEND_BODY else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("")
        super().connection_lost(exc)

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._phase, self._timer = phase, None
        if phase:
            seconds = self.headers_s if phase == "headers" else self.body_s
            self._timer = self.loop.call_later(seconds, self.transport.abort)
