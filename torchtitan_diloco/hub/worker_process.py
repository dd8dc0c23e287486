"""A worker that listens: by itself on another host, or as a child of the hub's process, which it does not outlive."""

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.crew import Worker
from torchtitan_diloco.hub.serving import server_of
from torchtitan_diloco.hub.tls import check_certificate, client_context
from torchtitan_diloco.hub.tokens import read_secret, read_tokens
from torchtitan_diloco.hub.worker import WorkerService
from torchtitan_diloco.listening import bind, url_of
from torchtitan_diloco.observe.logs import log_to_stderr
from torchtitan_diloco.process import die_with_parent


@dataclass(frozen=True, slots=True)
class Crewed:
    """How a hub gets its workers. count: processes that it starts itself, on ports from first_port on (0: free ones).

    urls: of those that were started elsewhere. secret: file of the secret that these have. ca_file: PEM file of the
    authorities that their certificates are checked against.
    """

    count: int = 0
    first_port: int = 0
    urls: Sequence[str] = ()
    secret: str = ""
    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker listens, and for whom: as the hub itself, see ``HubServer``. tokens: a file. folder: of its parts.

    setting: to name where it cannot listen.
    """

    host: str
    port: int
    run_id: str
    folder: str
    tokens: str = ""
    cert: str = ""
    key: str = ""
    setting: str = ""


class WorkerServer:
    """``run`` serves until ``stop`` is called."""

    def __init__(self, place: Place, secret: str) -> None:
        """Raises UserError."""
        access = Access(read_tokens(place.tokens) if place.tokens else None)
        access.require_loopback(place.host)
        check_certificate(place.cert, place.key)
        self._socket = bind(
            place.host, place.port, place.setting or f"syncer.bind = {place.host}:{place.port}"
        )
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(place.host, self.port, "https" if place.cert else "http")
        try:
            self.service = WorkerService(place.run_id, Path(place.folder), secret, access)
        except OSError as error:
            raise UserError(
                f"syncer.dir: {place.folder} cannot be written ({error.strerror}); give it another"
            ) from None
        self._server = server_of(self.service.app, place.cert, place.key)

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.should_exit = True


def crew_of(crewed: Crewed, at: Place) -> list[Worker]:
    """at: of the hub. Starts those that it has to start; who gets them has to ``close`` them. Raises UserError."""
    if crewed.urls:
        secret, trusted = read_secret(crewed.secret), client_context(crewed.ca_file)
        return [Worker(url, url, at.run_id, secret, trusted, crewed.ca_file) for url in crewed.urls]
    workers: list[Worker] = []
    children: list[Child] = []
    try:
        for k in range(crewed.count):
            port = crewed.first_port and crewed.first_port + k
            place = replace(at, port=port, setting=f"syncer.worker_port = {crewed.first_port}")
            children.append(Child(place))
        workers = [child.worker() for child in children]
    finally:
        if len(workers) < len(children):
            for child in children:
                child.end()
    return workers


class Child:
    """A worker that is being started."""

    def __init__(self, place: Place) -> None:
        self._place, self._secret = place, secrets.token_hex(32)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_diloco.hub.worker_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        # Not in its arguments or environment, where others may read it.
        told = {"place": asdict(place), "secret": self._secret, "parent": os.getpid()}
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()  # and stays open: at its end the child ends

    def worker(self) -> Worker:
        """It listens. Raises UserError when it does not."""
        place = self._place
        assert self._process.stdout is not None
        try:
            said = json.loads(self._process.stdout.readline())
        except ValueError:
            raise UserError("syncer.workers: a worker has ended at once; the lines above say why") from None
        if "error" in said:
            raise UserError(said["error"])
        # The hub's own machine, under whatever name islands know it.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.host, place.host)
        url = url_of(host, said["port"], "https" if place.cert else "http")
        trusted = _pinned(place.cert) if place.cert else True
        return Worker(url, f":{said['port']}", place.run_id, self._secret, trusted, place.cert, self._process)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _pinned(cert: str) -> ssl.SSLContext:
    """Who shows this very certificate, whatever names are in it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context


def main() -> None:
    """The child. It ends when its parent does, or closes its standard input, and leaves signals to it."""
    told = json.loads(sys.stdin.buffer.readline())
    die_with_parent(parent=told["parent"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    answer = sys.stdout.buffer
    try:
        server = WorkerServer(Place(**told["place"]), told["secret"])
    except UserError as error:
        answer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        answer.flush()
        return

    def serve() -> None:
        try:
            server.run()
        finally:
            os._exit(1)

    threading.Thread(target=serve, daemon=True, name="worker").start()
    answer.write(json.dumps({"port": server.port}).encode() + b"\n")
    answer.flush()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
