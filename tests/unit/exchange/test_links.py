"""Looking for connections among all that a process has open."""

import os
import socket
import tempfile

from torchtitan_diloco.exchange.links import _listening, _sockets


def test_looking_leaves_nothing_open_and_nothing_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile() as file:
        read, write = os.pipe()
        before = set(os.listdir("/dev/fd"))
        for _ in range(3):
            assert server.getsockname()[:2] in _listening()
            _sockets(lambda held: None)
        assert set(os.listdir("/dev/fd")) == before
        file.write(b"still open")
        os.write(write, b"too")
        assert os.read(read, 3) == b"too"
        os.close(read)
        os.close(write)
