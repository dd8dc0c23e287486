"""Proxies such as sites have: one that tunnels and cuts, one that knows few methods."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class ConnectProxy:
    """Tunnels to the named hosts (name -> local port), and closes every connection after some seconds, busy or not.

    rate: bytes per second of each direction of a connection. cut: how many connections were closed while bytes flowed.
    """

    def __init__(self, hosts: Mapping[str, int], life_s: float, rate: float) -> None:
        self._hosts, self._life_s, self._rate = hosts, life_s, rate
        self.tunnels = self.cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += near.recv(4096)
            method, target, _ = head.split(b"\r\n")[0].decode().split()
            host = target.rpartition(":")[0]
            if method != "CONNECT" or host not in self._hosts:
                near.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self._hosts[host])) as far:
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                self.tunnels += 1
                self._tunnel(near, far)

    def _tunnel(self, near: socket.socket, far: socket.socket) -> None:
        moved = [0.0]
        pumps = [
            threading.Thread(target=self._pump, args=(*ends, moved), daemon=True)
            for ends in ((near, far), (far, near))
        ]
        for pump in pumps:
            pump.start()
        end = time.monotonic() + self._life_s
        while time.monotonic() < end and all(pump.is_alive() for pump in pumps):
            time.sleep(0.05)
        if time.monotonic() - moved[0] < 0.05:
            self.cut += 1
        for side in (near, far):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, sink: socket.socket, moved: list[float]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                if len(data) > 16384:  # bulk
                    moved[0] = time.monotonic()
                time.sleep(len(data) / self._rate)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class PlainProxy:
    """Passes on requests of some methods to the named hosts (name -> local port), and answers 405 to all others."""

    def __init__(self, hosts: Mapping[str, int], allowed: Collection[str]) -> None:
        seen: set[tuple[str, int]] = set()
        self.seen = seen
        """(method, status) of what has passed."""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                url = urlsplit(self.path)
                if self.command not in allowed or url.hostname not in hosts:
                    self._reply(405, {}, b"")
                    return
                link = http.client.HTTPConnection("127.0.0.1", hosts[url.hostname], timeout=30)
                path = f"{url.path}?{url.query}" if url.query else url.path
                link.request(self.command, path, body or None, dict(self.headers))
                answer = link.getresponse()
                self._reply(answer.status, dict(answer.getheaders()), answer.read())
                link.close()

            def _reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                seen.add((self.command, status))
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_CONNECT = _pass_on

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # islands that hang up
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
