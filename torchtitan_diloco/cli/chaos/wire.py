"""The way of one island to the hub, as a process that a chaos run can cut (SIGSTOP) or make slow (SIGUSR1; SIGUSR2 ends it).

A stopped process goes on being connected to, by its kernel, and passes nothing on: as a link does over which packets are
lost, without a reset that would tell either side.
"""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan_diloco.cli.port_file import write_port

PIECE = 16 << 10


class Wire:
    """Passes every connection on to one target. slow: bytes a second that all together carry each way while it is slow."""

    def __init__(self, host: str, port: int, slow: float) -> None:
        self._target, self._slow = (host, port), slow
        self.is_slow = False
        self._free = {"up": 0.0, "down": 0.0}  # when the link has sent what it was given

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        both = (writer, far_writer)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(self._pump(reader, far_writer, "up", both))
            pumps.create_task(self._pump(far_reader, writer, "down", both))
        for end in both:
            end.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        way: str,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        """An end of one way is passed on, and the other goes on; a reset ends both."""
        try:
            while piece := await source.read(PIECE):
                await self._pass_on(len(piece), way)
                sink.write(piece)
                await sink.drain()
            sink.write_eof()
        except OSError:
            for end in both:
                end.close()

    async def _pass_on(self, nbytes: int, way: str) -> None:
        if not self.is_slow:
            return
        now = asyncio.get_running_loop().time()
        self._free[way] = max(now, self._free[way]) + nbytes / self._slow
        await asyncio.sleep(self._free[way] - now)


async def _run(options: argparse.Namespace) -> None:
    target = urlsplit(options.target)
    assert target.hostname and target.port
    wire = Wire(target.hostname, target.port, options.slow_mbit * 1e6 / 8)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, wire, "is_slow", True)
    loop.add_signal_handler(signal.SIGUSR2, setattr, wire, "is_slow", False)
    host, _, port = options.bind.rpartition(":")
    server = await asyncio.start_server(wire.serve, host, int(port))
    write_port(options.port_file, server.sockets[0].getsockname()[1])
    await server.serve_forever()


def main(argv: Sequence[str]) -> int:
    """``chaos wire``: started by the chaos command, not by people."""
    parser = argparse.ArgumentParser("torchtitan-diloco chaos wire")
    parser.add_argument("--target", required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--slow-mbit", type=float, required=True)
    asyncio.run(_run(parser.parse_args(argv)))
    return 0
