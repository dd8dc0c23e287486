"""Files that are there whole or not at all, whatever happens to the process or the machine."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, is on the disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_lines(path: Path) -> TextIO:
    """Open a file of lines to append to it. Raises OSError.

    A last line that was cut off (a full disk, a kill, a power failure) is ended first, or the next one would be lost with it.
    Line buffered: a kill loses nothing that was written, and readers see whole lines.
    """
    torn = is_torn(path)
    file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - the caller's
    try:
        if torn:
            file.write("\n")
    except OSError:
        file.close()
        raise
    return file


def is_torn(path: Path) -> bool:
    """Whether the last line was cut off. Raises OSError."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Replace a file; on failure nothing is left and the old one stays. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
