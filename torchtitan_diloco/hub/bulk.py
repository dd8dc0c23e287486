"""Bodies of requests and answers: read whole or not at all, bulk as chunks with a checksum."""

from collections.abc import AsyncIterator, Callable

import torch
import xxhash
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torchtitan_diloco.hub.dial import CHECKSUM
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.wellformed import whole

CHUNK_LIMIT = 16 << 20  # bytes of bulk in one request
PIECE = 256 << 10  # bytes that are handed to a connection at once
REASON_LIMIT = 2000  # characters


def length_of(request: Request, limit: int) -> int:
    """Of the body, which is not read yet. Raises Refusal."""
    length = whole(request.headers.get("content-length", ""), "the length of the body")
    if length > limit:
        raise Refusal("malformed", f"a body of this request has at most {limit} bytes, not {length}")
    return length


async def body_of(request: Request, limit: int) -> bytes:
    """All of it, or nothing: a body that was cut off is none. Raises Refusal."""
    length, body = length_of(request, limit), bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > length:
            break
    if len(body) != length:
        raise Refusal("malformed", f"the body has not the {length} bytes that it says, but {len(body)}")
    return bytes(body)


async def take_chunk(request: Request, where: Callable[[], Upload]) -> None:
    """A chunk of bulk. It goes where it belongs piece by piece, and counts once all of it is here and right.

    Raises Refusal.
    """
    offset, size = query(request, "offset"), length_of(request, CHUNK_LIMIT)
    at = offset
    try:
        where().check(offset, size)
        async for piece in request.stream():
            at += len(piece)
            if at > offset + size:
                break
            # Asked again with every piece: the same chunk may have come another way, and be in use.
            where().put(at - len(piece), piece)
        if at != offset + size:
            raise Refusal("malformed", f"the body has not the {size} bytes that it says, but {at - offset}")
        # Of what lies there: a damaged copy of this chunk may have come over another connection meanwhile.
        if where().checksum(offset, at) != request.headers.get(CHECKSUM):
            raise Refusal("malformed", f"the chunk at {offset} does not match its checksum")
        where().add(offset, at)
    except ValueError as error:
        raise Refusal("malformed", str(error)) from None


def chunk_of(request: Request, data: torch.Tensor) -> Response:
    """The bytes ``offset`` to ``offset + size``, with their checksum. Raises Refusal."""
    offset, size = query(request, "offset"), query(request, "size")
    if not 0 < size <= CHUNK_LIMIT or offset + size > data.numel():
        raise Refusal("malformed", f"{size} bytes from {offset} of {data.numel()} are none, or too many")
    chunk = data.numpy().data[offset : offset + size]
    headers = {CHECKSUM: xxhash.xxh3_64_hexdigest(chunk), "content-length": str(size)}
    return StreamingResponse(in_pieces(chunk), media_type="application/octet-stream", headers=headers)


async def in_pieces(chunk: memoryview) -> AsyncIterator[memoryview]:
    """So that no more of it is copied at a time than the connection takes."""
    for start in range(0, len(chunk), PIECE):
        yield chunk[start : start + PIECE]


def query(request: Request, name: str) -> int:
    """Raises Refusal unless it is a natural number."""
    return whole(request.query_params.get(name, ""), name)


def problem(reason: str, kind: str, status: int, headers: dict[str, str] | None = None) -> Response:
    # Whatever may stand in a reason, it has to arrive.
    shown = reason[:REASON_LIMIT].encode(errors="replace").decode()
    return JSONResponse({"error": shown, "kind": kind}, status_code=status, headers=headers)
