"""Where a sample of a run lies: sources cut into shards, each read as an endless stream over epochs.

Epoch e of a source with n samples is a permutation of them (see ``order``), keyed by the run's seed and the source. Shard s
of S holds the places p of it with p % S == s, so shards differ by at most one sample and together hold each once per epoch.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.order import permute
from torchtitan_diloco.outer.shares import compact, expand, split, stream

NAME_LENGTH = 12
"""Hex digits of a manifest's digest that name a source within a run."""

SMALL = 1 << 15
"""Up to this many samples the order of a whole epoch is kept, since a pass over few places costs as much as over many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source as the order of samples sees it. Equal names mean equal samples, on any island.

    shards: into how many it is cut. present: the shards this island may read.
    """

    name: str
    samples: int
    shards: int
    seed: int
    weight: float = 1.0
    present: tuple[int, ...] = ()

    @classmethod
    def cut(
        cls, digest: str, samples: int, *, shards: int, seed: int, weight: float = 1.0, present: str = ""
    ) -> "Source":
        """A source of ``samples`` samples in ``shards`` shards (fewer if it has fewer samples).

        digest: of its manifest. seed: of the run. present: ranges of shards, "" for all.
        Raises ValueError when ``present`` is not a list of ranges below the number of shards.
        """
        count = min(shards, samples)
        chosen = expand(present) if present else list(range(count))
        if present and (not chosen or chosen[-1] >= shards):
            raise ValueError(f"{present!r} is not a list of shards below {shards}")
        keyed = hashlib.sha256(f"{seed}/{digest}".encode()).digest()
        return cls(
            name=digest[:NAME_LENGTH],
            samples=samples,
            shards=count,
            seed=int.from_bytes(keyed[:8], "little"),
            weight=weight,
            present=tuple(shard for shard in chosen if shard < count),
        )

    def size(self, shard: int) -> int:
        """Samples of a shard in an epoch."""
        return shard_size(self.samples, self.shards, shard)

    @property
    def streams(self) -> list[str]:
        """The streams this island may read."""
        return [stream(self.name, shard) for shard in self.present]


def shard_size(samples: int, shards: int, shard: int) -> int:
    """Samples of one shard in an epoch: places p of ``range(samples)`` with p % shards == shard."""
    return samples // shards + (shard < samples % shards)


@dataclass(frozen=True, slots=True)
class Picks:
    """Consecutive samples of an island, as parallel arrays [n].

    source: index in the list of sources. shard. position: in its stream.
    """

    source: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: slice | npt.NDArray[np.bool_]) -> "Picks":
        return Picks(self.source[rows], self.shard[rows], self.position[rows])

    def counts(self, sources: Sequence[Source]) -> dict[str, int]:
        """How many of them are of each stream that occurs."""
        width = int(self.shard.max(initial=0)) + 1
        found, counts = np.unique(self.source * width + self.shard, return_counts=True)
        return {
            stream(sources[key // width].name, key % width): count
            for key, count in zip(found.tolist(), counts.tolist(), strict=True)
        }


def holds(sources: Sequence[Source]) -> dict[str, str]:
    """What an island tells others of its shards."""
    return {source.name: compact(source.present) for source in sources if source.present}


def ids_of(picks: Picks, sources: Sequence[Source]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(id in its source, epoch) of each pick, int64 [n] both."""
    ids, epochs = np.empty(len(picks), dtype=np.int64), np.empty(len(picks), dtype=np.int64)
    for index, source in enumerate(sources):
        here = picks.source == index
        if not here.any():
            continue
        shard, position = picks.shard[here], picks.position[here]
        sizes = source.samples // source.shards + (shard < source.samples % source.shards)
        epoch, within = np.divmod(position, sizes)
        places = within * source.shards + shard
        found = np.empty_like(places)
        for number in np.unique(epoch).tolist():
            chosen = epoch == number
            found[chosen] = _ordered(places[chosen], source, number)
        ids[here], epochs[here] = found, epoch
    return ids, epochs


def _ordered(places: npt.NDArray[np.int64], source: Source, epoch: int) -> npt.NDArray[np.int64]:
    if source.samples <= SMALL:
        return _whole_order(source.samples, source.seed, epoch)[places]
    return permute(places, source.samples, seed=source.seed, epoch=epoch)


@lru_cache(maxsize=32)
def _whole_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return permute(np.arange(samples), samples, seed=seed, epoch=epoch)


def check_streams(names: Iterable[str], sources: Sequence[Source]) -> list[str]:
    """Those that belong to none of the sources."""
    by_name = {source.name: source for source in sources}
    unknown = []
    for name in names:
        source, shard = split(name)
        if source not in by_name or shard >= by_name[source].shards:
            unknown.append(name)
    return unknown


Positions = Mapping[str, int]
"""Samples taken from each stream, over all epochs."""
