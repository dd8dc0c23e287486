"""An island's way through its streams, batch by batch: what comes next, and how far each stream is."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.mixture import Mixture
from torchtitan_diloco.data.streams import Picks, Source, holds, ids_of
from torchtitan_diloco.outer.shares import split

LOOK_AHEAD = 4096
"""Samples whose order is computed at once, at most: twice as many each time. They are not read before their turn."""

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(index of the source, id in it, epoch), all [n]."""


class Walk:
    """Positions of the streams an island reads. batch_size: samples of one micro-batch of the whole island."""

    def __init__(self, sources: Sequence[Source], batch_size: int, phase: int = 0) -> None:
        self._sources, self._batch_size, self._phase = sources, batch_size, phase
        # Streams that were read and belong to others meanwhile, or have left the site: counted, not read on.
        self._resting: dict[str, int] = {}
        self.assign({name: 0 for source in sources for name in source.streams})

    def holds(self) -> dict[str, str]:
        return holds(self._sources)

    def assign(self, positions: Mapping[str, int]) -> None:
        """Go on with these streams. Raises ValueError for a position below 0."""
        if any(position < 0 for position in positions.values()):
            raise ValueError(f"positions must not be negative: {dict(positions)}")
        present = {name for source in self._sources for name in source.streams}
        self._resting = {name: p for name, p in positions.items() if name not in present}
        self._begin = {name: p for name, p in positions.items() if name in present}
        self._mixture = Mixture(self._sources, self._begin, self._begin, self._phase)
        self._ahead: Picks | None = None
        self._used = 0
        self._look_ahead = 1  # batches
        self._own: tuple[tuple[int, int], Batch] | None = None

    def positions(self) -> dict[str, int]:
        """Samples handed out from each stream, counted from its begin."""
        now = dict(self._begin)
        if self._ahead is not None:
            for name, count in self._ahead[: self._used].counts(self._sources).items():
                now[name] += count
        return now | self._resting

    def epoch(self) -> int:
        epochs = []
        by_name = {source.name: source for source in self._sources}
        for name, position in self.positions().items():
            source, shard = split(name)
            epochs.append(position // by_name[source].size(shard))
        return min(epochs, default=0)

    def next_batch(self, first: int, count: int) -> Batch:
        """``count`` samples from the ``first`` on of the island's next micro-batch, which is then used up.

        Every call must be for the same part of a batch, or ``first`` 0 and ``count`` the whole of it.
        """
        if self._ahead is None or self._used >= len(self._ahead):
            self._advance()
        assert self._ahead is not None
        if self._own is None or self._own[0] != (first, count):
            row = np.arange(len(self._ahead)) % self._batch_size
            own = self._ahead[(row >= first) & (row < first + count)]
            ids, epochs = ids_of(own, self._sources)
            self._own = (first, count), (own.source, ids, epochs)
        begin = self._used // self._batch_size * count
        self._used += self._batch_size
        source, ids, epochs = self._own[1]
        return source[begin : begin + count], ids[begin : begin + count], epochs[begin : begin + count]

    def _advance(self) -> None:
        resting = self._resting
        self._begin = {name: p for name, p in self.positions().items() if name not in resting}
        batches = self._look_ahead
        self._look_ahead = max(1, min(2 * batches, LOOK_AHEAD // self._batch_size))
        self._ahead, self._used, self._own = self._mixture.take(batches * self._batch_size), 0, None
