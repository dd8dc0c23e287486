"""The TCP connections of gloo groups, which can be cut from outside.

A peer that is frozen, or behind a cut link, blocks an operation of gloo for its whole time-out, and gloo's ``abort`` does
nothing about it. An operation whose socket is shut down ends at once.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

Address = tuple[str, int]

_making = threading.Lock()
"""Held while a device is made, since which port it listens on is seen only by what is new after it."""


@contextmanager
def _held(descriptor: int) -> Iterator[socket.socket]:
    """A socket of this process under a descriptor of our own, which its owner cannot give to another file meanwhile."""
    copy = os.dup(descriptor)
    try:
        held = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        raise
    with held:
        yield held


def _sockets(look: Callable[[socket.socket], None]) -> None:
    """Call ``look`` with every TCP socket of this process."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError, ValueError), _held(int(name)) as held:
            if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                look(held)


def _listening() -> set[Address]:
    found: set[Address] = set()

    def look(held: socket.socket) -> None:
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.add(held.getsockname()[:2])

    _sockets(look)
    return found


class Links:
    """The connections of one group: those from or to the ports that its members' devices listen on."""

    def __init__(self) -> None:
        self._ports: set[Address] = set()

    def listen(self, make: Callable[[], Any]) -> Any:
        """Make this member's device."""
        with _making:
            before = _listening()
            device = make()
            self._ports = _listening() - before
        return device

    def tell(self, store: dist.Store, rank: int) -> None:
        """Let the others know of it; before the group connects, so that ``learn`` need not wait after it has."""
        store.set(f"listens/{rank}", " ".join(f"{port} {host}" for host, port in sorted(self._ports)))

    def learn(self, store: dist.Store, size: int) -> None:
        """What the others have told; one round trip."""
        for told in store.multi_get([f"listens/{rank}" for rank in range(size)]):
            words = told.decode().split()
            self._ports |= {(host, int(port)) for port, host in zip(words[::2], words[1::2], strict=True)}

    def cut(self) -> int:
        """Shut the connections down, whatever they are in the middle of. Returns how many there were."""
        count = 0

        def look(held: socket.socket) -> None:
            nonlocal count
            if {held.getsockname()[:2], held.getpeername()[:2]} & self._ports:
                held.shutdown(socket.SHUT_RDWR)
                count += 1

        _sockets(look)  # one that listens has no peer, and is passed over
        return count
