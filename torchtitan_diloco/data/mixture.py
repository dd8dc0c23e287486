"""The order in which an island takes samples from the streams it reads: a pure function of their positions.

Which source comes next follows the weights through the multiples of the golden ratio modulo 1 (the Kronecker sequence):
any stretch of it, wherever it begins, has every source within a few samples of its share. So nothing need be remembered but
positions, and islands, or one island before and after an amendment, may use different weights. Within a source it is the
stream that has come least far, so that all of them pass through an epoch together.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from torchtitan_diloco.data.streams import Picks, Source
from torchtitan_diloco.outer.shares import split, stream

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MASK = (1 << 64) - 1


class Mixture:
    """Takes samples from ``share``, beginning at ``positions``. phase: tells the sequences of islands apart."""

    def __init__(
        self, sources: Sequence[Source], share: Iterable[str], positions: Mapping[str, int], phase: int = 0
    ) -> None:
        self._sources = sources
        by_name = {source.name: index for index, source in enumerate(sources)}
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}  # source -> (epoch, within, shard)
        self._taken = phase * 7919
        for name in share:
            source_name, shard = split(name)
            index = by_name[source_name]
            position = positions.get(name, 0)
            self._taken += position
            epoch, within = divmod(position, sources[index].size(shard))
            self._heaps.setdefault(index, []).append((epoch, within, shard))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        # A source of weight 0 is read only where there is nothing else.
        weights = {i: sources[i].weight for i in sorted(self._heaps)}
        if not any(weights.values()):
            weights = dict.fromkeys(weights, 1.0)
        total, reached = sum(weights.values()), 0.0
        self._bounds: list[tuple[float, int]] = []
        for index, weight in weights.items():
            if weight > 0:
                reached += weight / total
                self._bounds.append((reached * 2.0**64, index))

    def __bool__(self) -> bool:
        return bool(self._heaps)

    def _next_source(self) -> int:
        if len(self._bounds) > 1:
            point = self._taken * _GOLDEN & _MASK
            for bound, index in self._bounds:
                if point < bound:
                    return index
        return self._bounds[-1][1]

    def take(self, count: int) -> Picks:
        """The next ``count`` samples. Raises ValueError when there is no stream to read."""
        if count and not self:
            raise ValueError("this island has no stream to read until the next committed slot")
        picked: list[tuple[int, int, int]] = []
        for _ in range(count):
            index = self._next_source()
            heap, source = self._heaps[index], self._sources[index]
            epoch, within, shard = heap[0]
            size = source.size(shard)
            picked.append((index, shard, epoch * size + within))
            following = (epoch, within + 1, shard) if within + 1 < size else (epoch + 1, 0, shard)
            heapq.heapreplace(heap, following)
            self._taken += 1
        return Picks(*np.array(picked, dtype=np.int64).reshape(-1, 3).T)

    def positions(self) -> dict[str, int]:
        """How far each stream of the share is now."""
        return {
            stream(self._sources[index].name, shard): epoch * self._sources[index].size(shard) + within
            for index, heap in self._heaps.items()
            for epoch, within, shard in heap
        }
