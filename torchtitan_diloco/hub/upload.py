"""Bytes that arrive in chunks: in any order, some of them twice, over several connections."""

import torch
import xxhash

from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.outer import buffers


class Upload:
    """A payload or tensor in the making. One thread at a time may use it."""

    def __init__(self, nbytes: int) -> None:
        """Raises Refusal when there is no memory for it."""
        self.nbytes = nbytes
        try:
            self.data = buffers.empty(nbytes, torch.uint8)
        except (OSError, MemoryError, RuntimeError) as error:
            raise Refusal("refused", f"the hub has no memory for {nbytes} bytes: {error}") from None
        self._here: list[tuple[int, int]] = []  # ranges that have arrived: sorted, apart from one another

    def check(self, offset: int, size: int) -> None:
        """Raises ValueError when so many bytes from there lie outside."""
        if not 0 <= offset < offset + size <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + size} lie outside of {self.nbytes}")

    def write(self, offset: int, chunk: bytes | memoryview) -> None:
        """A whole chunk that was checked. Raises ValueError when it lies outside."""
        if chunk:
            self.put(offset, chunk)
            self.add(offset, offset + len(chunk))

    def put(self, offset: int, piece: bytes | memoryview) -> None:
        """A piece of a chunk; it counts from ``add`` on. What counts already stays as it is.

        Raises ValueError when it lies outside.
        """
        stop = offset + len(piece)
        if not 0 <= offset <= stop <= self.nbytes:
            raise ValueError(f"bytes {offset} to {stop} lie outside of {self.nbytes}")
        target = self.data.numpy().data
        for start, end in self.missing():
            low, high = max(offset, start), min(stop, end)
            if low < high:
                target[low:high] = piece[low - offset : high - offset]

    @property
    def place(self) -> str:
        """Where else islands send it; empty: to the hub."""
        return ""

    def values(self) -> torch.Tensor:
        """What has come, as a tensor of a state."""
        return self.data.view(torch.float32)

    def checksum(self, start: int, stop: int) -> str:
        """XXH3-64 (hex) of what lies there now."""
        return xxhash.xxh3_64_hexdigest(self.data.numpy().data[start:stop])

    def add(self, start: int, stop: int) -> None:
        """These bytes are here, and right."""
        apart = [(a, b) for a, b in self._here if b < start or a > stop]
        touching = [(a, b) for a, b in self._here if b >= start and a <= stop]
        merged = (min([start, *(a for a, _ in touching)]), max([stop, *(b for _, b in touching)]))
        self._here = sorted([*apart, merged])

    def missing(self) -> list[tuple[int, int]]:
        """Ranges that have not arrived."""
        gaps, at = [], 0
        for start, stop in self._here:
            if start > at:
                gaps.append((at, start))
            at = max(at, stop)
        return [*gaps, (at, self.nbytes)] if at < self.nbytes else gaps

    @property
    def complete(self) -> bool:
        return not self.missing()
