"""Slices: how fragments are cut for an exchange between many islands, and which island owns, that is merges, which slice.

Few islands send their encoded deltas of b bytes to one another: (M - 1) b from each of M. Beyond ``FEW`` every slice has an
owner: it gets the slice from all, merges, encodes the result and sends it to all, which is 2 (M - 1) / M b. The cut is fixed
for a run, since a delta is encoded before it is known who takes part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise

import torch

from torchtitan_diloco.outer import buffers

FEW = 4
"""So many islands send one another everything: one quantisation instead of two, and hardly more bytes."""


def count_for(islands: int) -> int:
    """Slices of every fragment in a run founded by ``islands`` islands. 1: fragments are not cut."""
    return islands if islands > FEW else 1


def cut(numel: int, unit: int, count: int) -> tuple[tuple[int, int], ...]:
    """``count`` ranges of nearly equal length that make up ``numel`` values, cut at multiples of ``unit``.

    Some are empty where there are fewer units than slices.
    """
    units = -(-numel // unit)
    edges = [min(numel, units * j // count * unit) for j in range(count + 1)]
    return tuple(pairwise(edges))


def owners(islands: Sequence[int], count: int) -> tuple[int, ...]:
    """The owner of each slice among ``islands``: slice j is island j's, if that is there.

    The slices of those who are not are dealt out to the others in turn, so that an island that comes or goes moves its
    own slice and hardly another: with an owner, a slice's residual changes hands, which loses it.
    """
    spare = cycle(sorted(islands))
    return tuple(j if j in islands else next(spare) for j in range(count))


@dataclass(frozen=True, slots=True)
class Division:
    """A payload, that is the encodings of all slices one after the other, among their owners.

    owners, sizes: of each slice, the island and the bytes.
    """

    owners: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, island: int) -> tuple[int, ...]:
        """The slices that the island owns."""
        return tuple(j for j, owner in enumerate(self.owners) if owner == island)

    def nbytes(self, island: int) -> int:
        return sum(self.sizes[j] for j in self.of(island))

    def part(self, payload: torch.Tensor, island: int) -> torch.Tensor:
        """The island's slices of a payload, one after the other (uint8, 1-D)."""
        slices = torch.split(payload, list(self.sizes))
        mine = [slices[j] for j in self.of(island)] or [payload[:0]]
        return mine[0] if len(mine) == 1 else torch.cat(mine)

    def join(self, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The payload whose ``part`` each owner's entry is."""
        slices: dict[int, torch.Tensor] = {}
        for island in set(self.owners):
            mine = self.of(island)
            ends = list(accumulate((self.sizes[j] for j in mine), initial=0))
            slices |= {
                j: parts[island][low:high] for j, (low, high) in zip(mine, pairwise(ends), strict=True)
            }
        payload = buffers.empty(sum(self.sizes), torch.uint8)
        return torch.cat([slices[j] for j in range(len(self.sizes))], out=payload)
