"""Links between islands of one process that a test can cut: gloo's sockets, and a proxy before the control path."""

import contextlib
import socket
import threading
from collections.abc import Collection

import psutil


def cut_gloo(keep: Collection[int], at_most: int | None = None) -> int:
    """Shut down every TCP connection of this process but those with an end at a port to keep. Returns how many.

    at_most: end after so many.
    """
    count = 0
    for link in psutil.Process().net_connections("tcp"):
        if count == at_most:
            break
        ends = {end.port for end in (link.laddr, link.raddr) if end}
        if link.status != psutil.CONN_ESTABLISHED or link.fd < 0 or ends & set(keep):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=socket.dup(link.fd)) as held:
            held.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


class Proxy:
    """Forwards TCP connections to a local port, until it is cut; connections then close, and new ones at once."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._down = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._down.set()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()
        timer = threading.Timer(seconds, self._down.clear)
        timer.daemon = True
        timer.start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._down.is_set():
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
