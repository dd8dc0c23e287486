"""A folder that appears complete or not at all, made by one process at a time."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_diloco.durable import sync

logger = logging.getLogger(__name__)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds a lock beside `path`; waits while another process holds it, and is freed by the kernel if that one dies.

    Yields False on a file system without locks: the caller then relies on the atomic rename alone.
    """
    lock = path.parent / f".{path.name}.lock"
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            locked = _acquire(descriptor, path)
            # The last holder removes the file; a lock on a removed file protects nothing.
            current = _names(lock, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if current or not locked:
            break
        os.close(descriptor)
    try:
        yield locked
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _names(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _acquire(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that prepares %s", path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): two processes may prepare it at once", path, error
        )
        return False
    return True


@contextmanager
def appearing_folder(path: Path, *, clean: bool) -> Iterator[Path]:
    """Gives an empty hidden sibling of `path` to fill; at the end it is flushed to disk and renamed to `path`.

    Whatever is raised inside removes it. `clean` (only under the lock) also removes what a killed process left behind.
    Raises OSError, in particular when `path` has become a non-empty folder in the meantime.
    """
    prefix = f".{path.name}.preparing-"
    if clean:
        for leftover in path.parent.iterdir():
            if leftover.name.startswith(prefix):
                shutil.rmtree(leftover)
    folder = path.parent / f"{prefix}{os.uname().nodename}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        os.rename(folder, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
