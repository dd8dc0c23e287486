"""The process through which an island reaches the hub: passes on, passes on little."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import pytest

from torchtitan_diloco.cli.chaos.wire import Wire

SLOW = 100_000  # bytes a second


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


def through_a_wire(
    use: Callable[[Wire, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], alive: bool = True
) -> None:
    async def run() -> None:
        far = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = far.sockets[0].getsockname()[1]
        if not alive:
            far.close()
        wire = Wire("127.0.0.1", port, SLOW)
        near = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*near.sockets[0].getsockname())
        await asyncio.wait_for(use(wire, reader, writer), 20)
        writer.close()
        near.close()
        far.close()

    asyncio.run(run())


def test_what_goes_in_comes_out_on_both_ways_and_an_end_is_passed_on() -> None:
    async def use(wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = bytes(range(256)) * 2000
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data

    through_a_wire(use)


def test_a_slow_wire_carries_what_it_may() -> None:
    async def use(wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.is_slow = True
        began = time.monotonic()
        writer.write(bytes(SLOW // 2))
        await reader.readexactly(SLOW // 2)
        assert time.monotonic() - began >= 0.49, "half a second's worth; both ways carry at once"
        wire.is_slow = False
        began = time.monotonic()
        writer.write(bytes(20 * SLOW))
        await reader.readexactly(20 * SLOW)
        assert time.monotonic() - began < 10, "no longer at twenty seconds' worth"

    through_a_wire(use)


def test_where_nobody_listens_the_connection_ends() -> None:
    async def use(wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""

    through_a_wire(use, alive=False)


@pytest.mark.parametrize("words", [["--target", "http://127.0.0.1:1"]])
def test_it_is_started_with_all_it_needs(words: list[str]) -> None:
    from torchtitan_diloco.cli.chaos import wire

    with pytest.raises(SystemExit):
        wire.main(words)
