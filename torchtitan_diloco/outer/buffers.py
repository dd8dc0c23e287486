"""Memory for flat tensors that come and go with every slot: taken from the kernel once, then used again and again.

The first touch of a page costs several times what a copy into it does, and the C library gives large blocks back at once.
"""

import mmap
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock

import numpy as np
import torch

GRAIN = 2 << 20
"""Blocks are multiples of it, so that fragments of nearly one size share them, and that huge pages fit."""

SMALL = 1 << 20
"""Bytes below which the C library does it as well."""

ROOMIEST = 1.25
"""A free block is used for what is smaller than it by this factor at most; fragments are nearly of one size."""


class Buffers:
    """Free blocks. A tensor from here gives its memory back by itself once nothing refers to it, or to a view of it.

    Thread-safe. What was in use at the same time is kept until ``release``.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[mmap.mmap] = []
        # Tensors die in any thread, even in one that holds the lock: their blocks wait here, appended without it.
        self._returned: deque[mmap.mmap] = deque()

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Like ``torch.empty``: 1-D, contiguous, on the CPU, with whatever values."""
        nbytes = numel * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(numel, dtype=dtype)
        block = self._fitting(nbytes) or new_block(nbytes)
        # torch keeps this array alive for as long as any tensor shares the storage.
        owner = np.frombuffer(block, dtype=np.uint8, count=nbytes)
        weakref.finalize(owner, self._returned.append, block).atexit = False
        return torch.from_numpy(owner).view(dtype)

    def release(self) -> None:
        """Give the free blocks back to the kernel."""
        with self._lock:
            self._free.clear()
            self._returned.clear()

    @property
    def free_bytes(self) -> int:
        """Of blocks that nobody uses."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _fitting(self, nbytes: int) -> mmap.mmap | None:
        """The smallest free block that holds so much, and not much more; it is taken."""
        with self._lock:
            self._collect()
            fitting = [b for b in self._free if nbytes <= len(b) <= max(ROOMIEST * nbytes, nbytes + GRAIN)]
            if not fitting:
                return None
            block = min(fitting, key=len)
            self._free = [b for b in self._free if b is not block]
            return block


def new_block(nbytes: int) -> mmap.mmap:
    """Fresh memory of at least ``nbytes``; no page of it is there before it is used."""
    block = mmap.mmap(-1, -(-nbytes // GRAIN) * GRAIN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not the last, partial one: what is never touched of it should take no memory.
    if whole := nbytes // GRAIN * GRAIN:
        with suppress(OSError):  # a kernel without them has small ones
            block.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return block


_buffers = Buffers()
empty = _buffers.empty
release = _buffers.release
