"""Two preflights that dial each other, in place of the sockets that the gloo transport will open.

At ``island.port`` an island takes messages from its peers, and at two ports that the machine chooses it serves the store in
which gloo's pairs find one another, and the pairs themselves. Every connection carries a line each way, since something on
the way may accept what it does not pass on.
"""

import contextlib
import json
import socket
import threading
import time
from typing import Any

from torchtitan_diloco.listening import bind
from torchtitan_diloco.preflight.dial import ANSWER_S, Place, connect, ephemeral

PURPOSES = ("messages", "store", "gloo pair")
LINE_LIMIT = 4096  # bytes
HEARD_WITHIN_S = 1.0


class Strange(Exception):
    """Whoever answers is no preflight of this run."""


class Post:
    """Listens in the place of island ``island`` of run ``run``; ``heard`` has, for each other island, what has come."""

    def __init__(self, host: str, port: int, run: str, island: int) -> None:
        """Raises UserError naming the setting when it cannot listen there."""
        self._run, self._island = run, island
        self.heard: dict[int, set[str]] = {}
        self.news = threading.Condition()
        self.dials_until = 0.0
        """When (monotonic) this side gives up dialling others; it tells them."""
        self._expected: set[int] = set()
        self._closed = False
        self._sockets = {purpose: bind(host, port if purpose == "messages" else 0) for purpose in PURPOSES}
        self.ports = {purpose: sock.getsockname()[1] for purpose, sock in self._sockets.items()}
        for purpose, sock in self._sockets.items():
            threading.Thread(target=self._accept, args=(purpose, sock), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):  # wakes the thread that accepts
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def missing(self, island: int) -> list[str]:
        """What has not come from that island."""
        return [purpose for purpose in PURPOSES if purpose not in self.heard.get(island, ())]

    def goes_on(self, island: int, dials_for_s: object) -> None:
        """That island has said for how long it will dial: whether it has to be heard."""
        if isinstance(dials_for_s, int | float) and dials_for_s > HEARD_WITHIN_S:
            self._expected.add(island)

    def expects(self, island: int) -> bool:
        return island in self._expected

    def _accept(self, purpose: str, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(purpose, sock), daemon=True).start()

    def _answer(self, purpose: str, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_S)
        with sock, contextlib.suppress(OSError, Strange):
            said = _read(sock)
            _write(
                sock,
                {
                    "run": self._run,
                    "island": self._island,
                    "ports": self.ports,
                    "range": ephemeral(),
                    "dials_for_s": max(0.0, self.dials_until - time.monotonic()),
                },
            )
            if said["run"] == self._run:
                with self.news:
                    self.heard.setdefault(said["island"], set()).add(purpose)
                    self.news.notify_all()


def greet(place: Place, run: str, island: int, until: float) -> dict[str, Any]:
    """What the preflight there says of itself. Raises OSError, or Strange."""
    with connect(place, until) as sock:
        _write(sock, {"run": run, "island": island})
        said = _read(sock)
    if said["run"] != run:
        raise Strange(f"a preflight of run {said['run']} answers, not of {run} (job.name)")
    return said


def _write(sock: socket.socket, value: dict[str, Any]) -> None:
    sock.sendall(
        json.dumps(value).encode() + b"\n\r\n"
    )  # to a running island it is a request that it refuses


def _read(sock: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_LIMIT:
        piece = sock.recv(1)
        if not piece:
            raise Strange("it takes the connection, and closes it without a word")
        line += piece
    if line.startswith(b"HTTP/"):
        raise Strange("an island is running there already, or another web server")
    try:
        said = json.loads(line)
        if not (isinstance(said["run"], str) and isinstance(said["island"], int)):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise Strange("something else than a preflight answers there") from None
    return dict(said)
