"""Files that are there whole or not at all, whatever happens to the process or the machine."""

import os
from collections.abc import Iterable
from pathlib import Path


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, is on the disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
