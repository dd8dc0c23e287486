"""Requests to an ASGI application as raw as they come: any header, any length, a body in pieces or cut off."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def ask(
    app: Any,
    method: str,
    path: str,
    query: bytes = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
    pieces: Sequence[bytes] = (),
    cut_off: bool = False,
) -> Answer:
    """cut_off: the connection ends after those pieces of the body."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": b"", "query_string": query, "root_path": "", "scheme": "http", "headers": list(headers),
        "server": ("hub", 80), "client": ("island", 1),
    }  # fmt: skip
    coming: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    if not cut_off:
        coming.append({"type": "http.request", "body": b"", "more_body": False})
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    await asyncio.wait_for(app(scope, receive, send), 20)
    body = b"".join(message.get("body", b"") for message in said[1:])
    return Answer(said[0]["status"], dict(said[0]["headers"]), body)
