"""A command whose reader goes away: nothing raises, nothing is complained about when the interpreter ends."""

import errno
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from torchtitan_diloco.cli.output import Dispensable, dispensable_output


def broken_pipe() -> io.TextIOWrapper:
    """Nobody reads it."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8")


def test_what_cannot_be_written_is_dropped_and_rich_does_not_exit() -> None:
    with broken_pipe() as pipe:
        stream = Dispensable(pipe)
        assert stream.write("a" * 100_000) == 100_000
        stream.flush()
        Console(file=stream).print("b")  # type: ignore[arg-type]
        print("c", file=stream, flush=True)  # type: ignore[arg-type]
        assert stream.encoding == "utf-8" and not stream.isatty()
    # That it closes without an error is the point: what was buffered went nowhere.


def test_a_slow_reader_is_not_a_lost_one() -> None:
    class Slow(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise BlockingIOError(errno.EAGAIN, "full")
            return super().write(text)

    slow = Slow()
    stream = Dispensable(slow)
    stream.write("dropped")
    slow.full = False
    stream.write("read")
    assert slow.getvalue() == "read"


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_streams_without_a_descriptor_are_silenced_too(error: int) -> None:
    class Gone(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise OSError(error, os.strerror(error))

    stream = Dispensable(gone := Gone())
    stream.write("a")
    stream.write("b")
    assert gone.tries == 1


def test_streams_are_given_back_and_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    before = sys.stderr
    with dispensable_output():
        assert sys.stdout is None and sys.stderr is not before
        print("to nobody")
    assert sys.stdout is None and sys.stderr is before


@pytest.mark.parametrize("argv", [["run", "--help"], ["validate", "--help"]])
@pytest.mark.parametrize("lost", [("stdout",), ("stdout", "stderr")])
def test_a_command_without_readers_ends_without_a_word(argv: list[str], lost: tuple[str, ...]) -> None:
    with broken_pipe() as pipe:
        streams = {name: pipe if name in lost else subprocess.PIPE for name in ("stdout", "stderr")}
        done = subprocess.run([sys.executable, "-m", "torchtitan_diloco", *argv], **streams, check=False)  # type: ignore[call-overload]
    assert done.returncode == (0 if argv[0] == "run" else 1)
    assert not done.stderr
