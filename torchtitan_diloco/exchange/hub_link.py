"""Requests to the hub: messages one at a time, bulk as chunks over several connections. Nothing here waits for ever."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import torch
import xxhash

from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.exchange.chunks import Chunks, Unreachable
from torchtitan_diloco.exchange.hedge import LINES, Hedge
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.hub.dial import CHECKSUM, EPOCH, INCARNATION, ISLAND, RUN, host_of, make_client
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.tls import client_context, distrust
from torchtitan_diloco.hub.tokens import read_token
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.policy import Member

REQUEST_S = 10.0  # for a message
CHUNK_S = 60.0  # for a chunk, however slow the link
CONNECT_S = 10.0


class Link(Protocol):
    """A way to the hub. All of it raises Unreachable, or Refusal with what the hub answers."""

    @property
    def url(self) -> str:
        """Where the hub is, for people."""

    def ask(
        self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, **query: int
    ) -> dict[str, Any]: ...

    def beat(self, body: Any) -> dict[str, Any]:
        """The answer to a sign of life, which must not wait behind anything."""

    def put(
        self, path: str, data: torch.Tensor, ranges: Iterable[tuple[int, int]], moved: Callable[[int], None], **query: int
    ) -> None: ...  # fmt: skip

    def get(self, path: str, into: Upload, moved: Callable[[int], None]) -> None: ...

    def close(self) -> None: ...


class HubLink:
    """config: its addresses are of one hub, and the first that answers is used. streams: connections for bulk. pace: for
    what is sent."""

    def __init__(
        self, config: TransportConfig, run_id: str, member: Member, streams: int, pace: TokenBucket
    ) -> None:
        """Raises UserError where files that the settings name, or the environment's proxies, cannot be used."""
        self._urls, self._at = list(config.urls), 0
        self._pace, self._ca_file = pace, config.ca_file
        self._epoch = 0
        self._lock = threading.Lock()
        headers = {RUN: run_id, ISLAND: str(member.island), INCARNATION: member.incarnation}
        if config.token_file:
            headers["authorization"] = f"Bearer {read_token(config.token_file)}"
        trusted = client_context(config.ca_file)

        def client(connections: int, timeout_s: float) -> httpx.Client:
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            return make_client(self._urls, headers, trusted, connections, timeout)

        self._messages = client(32, REQUEST_S)
        self._beats = [client(1, REQUEST_S) for _ in range(LINES)]
        self._hedge = Hedge(self._beats)
        self._bulk = client(streams, CHUNK_S)
        self._chunks = Chunks(streams, "hub-bulk")

    @property
    def url(self) -> str:
        return self._urls[self._at % len(self._urls)]

    def close(self) -> None:
        self._chunks.close()
        for client in (self._messages, self._bulk, *self._beats):
            client.close()

    def ask(
        self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, **query: int
    ) -> dict[str, Any]:
        """The answer to a message. wait_s: how long the hub may take on purpose. Raises Unreachable or Refusal."""
        timeout = httpx.Timeout(REQUEST_S + wait_s)
        return self._ask(self._messages, method, path, params=query, json=body, timeout=timeout)

    def beat(self, body: Any) -> dict[str, Any]:
        """The answer to a sign of life. Raises Unreachable or Refusal."""
        return self._hedge.ask(lambda client: self._ask(client, "POST", "/beat", json=body))

    def _ask(self, client: httpx.Client, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        response = self._send(client, method, path, **arguments)
        try:
            answer = response.json()
        except ValueError:
            raise Unreachable(f"{self.url}{path} does not answer with JSON") from None
        if not isinstance(answer, dict):
            raise Unreachable(f"{self.url}{path} does not answer with a JSON object")
        return answer

    def put(
        self, path: str, data: torch.Tensor, ranges: Iterable[tuple[int, int]], moved: Callable[[int], None], **query: int
    ) -> None:  # fmt: skip
        """Send those ranges of the bytes. moved: is told how many have gone. Raises Unreachable or Refusal."""
        values = data.numpy().data

        def send(start: int, stop: int) -> None:
            chunk = values[start:stop]
            self._pace.take(len(chunk))
            self._send(
                self._bulk, "PUT", path, params={"offset": start, **query}, content=chunk.tobytes(),
                headers={CHECKSUM: xxhash.xxh3_64_hexdigest(chunk)},
            )  # fmt: skip
            moved(len(chunk))

        self._chunks.each(send, ranges)

    def get(self, path: str, into: Upload, moved: Callable[[int], None]) -> None:
        """Fetch what is missing of it; what has come stays, whatever happens. Raises Unreachable or Refusal.

        moved: is told how many bytes have come.
        """
        request = lambda start, size: self._send(
            self._bulk, "GET", path, params={"offset": start, "size": size}
        )
        self._chunks.fetch(path, into, request, moved)

    def _send(self, client: httpx.Client, method: str, path: str, **arguments: Any) -> httpx.Response:
        at, url = self._at, self.url
        if path.startswith(":"):  # of another process on the hub's machine
            url, path = f"{urlsplit(url).scheme}://{host_of(url)}", path
        elif "://" in path:
            place = urlsplit(path)
            if url.startswith("https:") and place.scheme != "https":
                raise Refusal(
                    "refused", f"it names {path}, where the island's token could be read on the way"
                )
            url, path, at = f"{place.scheme}://{place.netloc}", place.path, -1  # nobody's way to the hub
        try:
            response = client.request(method, url + path, **arguments)
        except (httpx.TransportError, httpx.InvalidURL, RuntimeError) as error:
            if mistake := distrust(error, url, self._ca_file):
                raise mistake from error
            self._leave(at)
            raise Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
        epoch = response.headers.get(EPOCH, "")
        if not epoch.isdigit():
            self._leave(at)
            raise Unreachable(f"{url}{path} answers {response.status_code}, and is no hub")
        if int(epoch) < self._epoch:
            self._leave(at)
            raise Unreachable(f"{url} is an earlier start of the hub, number {epoch}, not {self._epoch}")
        with self._lock:
            self._epoch = max(self._epoch, int(epoch))
        if response.is_success:
            return response
        try:
            answer = response.json()
            kind, reason = answer["kind"], str(answer["error"])
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{url}{path} answers {response.status_code}") from None
        if kind not in ("malformed", "stranger", "refused", "gone", "forbidden"):
            raise Unreachable(f"{url}: {reason}")
        raise Refusal(kind, reason)

    def _leave(self, at: int) -> None:
        """The next address from now on; once, however many connections have failed at that one."""
        with self._lock:
            if self._at == at:
                self._at += 1
