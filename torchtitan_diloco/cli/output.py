"""Standard streams of a command that must outlive whoever reads them: `run ... | head`, or a `tee` that Ctrl-C ends first.

Imports nothing slow.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO


class Dispensable:
    """A text stream that never raises OSError: from the first failure on, what is written is dropped.

    Every other attribute is that of the stream itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    def write(self, text: str) -> int:
        if not self._lost:
            self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._lost:
            self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BlockingIOError:
            pass  # the reader is only slow: this text is dropped, what follows may be read again
        except OSError:
            self._lost = True
            # What is still buffered would fail once more when the interpreter flushes at its end.
            to_nowhere(self._stream)


def to_nowhere(stream: TextIO) -> None:
    """Let what the stream holds and gets vanish, if it has a file descriptor at all."""
    with contextlib.suppress(OSError):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


@contextlib.contextmanager
def dispensable_output() -> Iterator[None]:
    """Inside, losing the reader of stdout or stderr neither ends nor harms the command.

    Libraries must see it too: rich, told by the stream that its reader has gone, exits the process with 1.
    """
    before = sys.stdout, sys.stderr
    # A stream that was closed from the start (`>&-`) is None, and print takes that.
    inside = [Dispensable(stream) if stream is not None else None for stream in before]
    sys.stdout, sys.stderr = inside  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in inside:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
