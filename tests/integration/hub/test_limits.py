"""Requests that are too large or too slow cost the hub nothing, and islands do not notice them."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.helpers.hub_islands import RUN, HubIsland, together
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.bulk import CHUNK_LIMIT
from torchtitan_diloco.hub.limits import HEADERS_LIMIT, PatientProtocol
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.tokens import digest

TOKEN = "the-token-of-island-0"
HEAD = (
    f"host: hub\r\nx-diloco-run: {RUN}\r\nx-diloco-island: 0\r\nx-diloco-incarnation: a\r\n"
    f"authorization: Bearer {TOKEN}\r\n"
)


@pytest.fixture(params=["with a token", "without"])
def head(request: pytest.FixtureRequest) -> str:
    return HEAD if request.param == "with a token" else "host: hub\r\n"


@pytest.fixture
def hub(make_hub) -> HubServer:
    return make_hub(access=Access({"island-0": digest(TOKEN)}))


def dial(hub: HubServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", hub.port), timeout=10)


def answer(link: socket.socket) -> bytes:
    """All that comes until the hub hangs up."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := link.recv(65536):
            found += data
    return found


def pour(link: socket.socket, pieces: Iterator[bytes], most: int) -> int:
    """How many bytes the hub has taken when it hangs up, or ``most``."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            link.sendall(piece)
            sent += len(piece)
            if sent >= most:
                break
            time.sleep(0.001)
    return sent


@pytest.mark.parametrize("also", ["", "content-length: 10\r\n"])
def test_a_body_in_chunks_without_a_length_is_refused_before_it_is_read(
    hub: HubServer, head: str, also: str
) -> None:
    with dial(hub) as link:
        start = f"POST /join HTTP/1.1\r\n{head}{also}transfer-encoding: chunked\r\n\r\n"
        link.sendall(start.encode())
        assert answer(link).startswith(b"HTTP/1.1 411 ")
    with dial(hub) as link:
        link.sendall(start.encode())
        chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
        assert pour(link, iter(lambda: chunk, b""), 256 << 20) < 16 << 20


@pytest.mark.parametrize("length", [str(CHUNK_LIMIT + 1), "9" * 30])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    hub: HubServer, head: str, length: str
) -> None:
    with dial(hub) as link:
        link.sendall(f"PUT /state/anchor.0 HTTP/1.1\r\n{head}content-length: {length}\r\n\r\n".encode())
        assert answer(link)[:13] in (b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")


def test_a_length_that_is_none_is_refused(hub: HubServer, head: str) -> None:
    for length in ("-1", "1e3", "0x10", "ten"):
        with dial(hub) as link:
            link.sendall(f"POST /beat HTTP/1.1\r\n{head}content-length: {length}\r\n\r\n".encode())
            assert answer(link).startswith(b"HTTP/1.1 400 ")


def test_headers_that_are_too_large_are_refused(hub: HubServer, head: str) -> None:
    with dial(hub) as link:
        link.sendall(f"GET /state HTTP/1.1\r\n{head}".encode())
        pieces = iter(lambda: b"x-more: " + bytes(b"y" * 4000) + b"\r\n", b"")
        assert pour(link, pieces, 64 << 20) < HEADERS_LIMIT + (4 << 20)
    with dial(hub) as link:
        link.sendall(b"GET /" + b"x" * (HEADERS_LIMIT + 1))
        assert answer(link).startswith(b"HTTP/1.1 400 ")


def test_who_sends_slowly_is_cut_off(hub: HubServer, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "headers_s", 0.4)
    monkeypatch.setattr(PatientProtocol, "body_s", 0.8)
    whole = f"GET /state HTTP/1.1\r\n{head}\r\n".encode()
    begun = f"POST /join HTTP/1.1\r\n{head}content-length: 1000\r\n\r\n".encode()
    for first, least in ((b"", 0.3), (b"GET /st", 0.3), (whole + b"GET ", 0.3), (begun, 0.7)):
        with dial(hub) as link:
            link.sendall(first)
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < began + 5:
                    link.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        if not link.recv(65536):
                            break
                    link.sendall(b"x")  # never idle, never done
            assert least < time.monotonic() - began < 3, first


def test_a_connection_that_waits_for_its_next_request_is_kept(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "headers_s", 0.3)
    monkeypatch.setattr(PatientProtocol, "body_s", 0.3)
    request = f"POST /leave HTTP/1.1\r\n{HEAD}content-length: 2\r\n\r\n{{}}".encode()
    with dial(hub) as link:
        for _ in range(3):
            link.sendall(request[:-1])
            time.sleep(0.1)
            link.sendall(request[-1:])
            found = b""
            while b"}" not in found:
                found += link.recv(65536)
            assert found.startswith(b"HTTP/1.1 401 ")
            time.sleep(0.5)


def test_slow_clients_hold_nobody_up(make_hub) -> None:
    hub = make_hub()
    slow = [dial(hub) for _ in range(200)]
    for i, link in enumerate(slow):
        link.sendall(
            b"POST /join HTTP/1.1\r\nhost: hub\r\ncontent-length: 4000000\r\n\r\n{" if i % 2 else b"GET /sta"
        )
    islands = [HubIsland(i, [hub.url]) for i in range(2)]
    began = time.monotonic()
    together([lambda i=i: (i.join(), i.run(10), i.transport.leave("done")) for i in islands], 60)  # type: ignore[misc]
    assert [status for _, status in islands[0].statuses] == ["committed"] * 10
    assert time.monotonic() - began < 15
    for link in slow:
        link.close()
