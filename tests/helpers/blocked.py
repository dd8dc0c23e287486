"""Ports as firewalls make them: one that answers nothing at all, one that takes connections and says nothing."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def dropping(host: str = "127.0.0.1") -> Iterator[int]:
    """A port whose packets are dropped in silence: the kernel does so where the queue of a listener is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((host, port))
        yield port


@contextlib.contextmanager
def silent(host: str = "127.0.0.1") -> Iterator[int]:
    """A port at which connections are taken, by the kernel, and nothing is ever said."""
    with socket.create_server((host, 0), backlog=50) as listener:
        yield listener.getsockname()[1]


def closed(host: str = "127.0.0.1") -> int:
    """A port at which nothing listens."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
