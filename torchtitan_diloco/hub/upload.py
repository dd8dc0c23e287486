"""Bytes that arrive in chunks: in any order, some of them twice, over several connections."""

import torch

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

    def write(self, offset: int, chunk: bytes | memoryview) -> None:
        """A chunk that was checked. Raises ValueError when it lies outside."""
        if not chunk:
            return
        stop = offset + len(chunk)
        if not 0 <= offset <= stop <= self.nbytes:
            raise ValueError(f"bytes {offset} to {stop} lie outside of {self.nbytes}")
        self.data.numpy().data[offset:stop] = chunk
        self._add(offset, stop)

    def _add(self, start: int, stop: int) -> None:
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
