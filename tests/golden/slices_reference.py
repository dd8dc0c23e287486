"""The exchange beyond four islands written out in NumPy: owners encode what they have merged, slice by slice.

Imports nothing of ours. With t = merged + r, r what the owner's last encoding of the slice lost (0 where the owner is another
than at the last slot, or has begun anew), everybody takes decode(encode(t)), and the owner keeps r' = t - decode(encode(t)).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.golden.codec_reference import CHUNK, Wire, decode, encode, noise_seed

FEW = 4

Owned = Mapping[tuple[int, int], tuple[int, np.ndarray]]
"""Range of values -> owner, and its residual."""


@dataclass(frozen=True)
class Slot:
    """What decides on owners and noise. founders: how many islands have founded the run. members: of the slot.

    hub: the hub owns all slices, of however few islands.
    """

    run: str
    number: int
    fragment: int
    fragments: int
    founders: int
    members: Sequence[int]
    hub: bool = False

    @property
    def has_owners(self) -> bool:
        return self.hub or (self.founders > FEW and len(self.members) > FEW)

    def owners(self) -> list[int]:
        """By slice."""
        if self.hub:
            return [-1] * (self.founders if self.founders > FEW else 1)
        return owners_of(self.members, self.founders)


def unit_of(wire: Wire) -> int:
    """Values that are encoded together."""
    if wire.name in ("fp32", "bf16"):
        return 1
    return CHUNK if wire.name == "topk" else wire.values_per_scale


def cut(numel: int, unit: int, count: int) -> list[tuple[int, int]]:
    """As equal as whole units allow, the longer ones behind."""
    units = int(np.ceil(numel / unit))
    edges = [min(numel, int(np.floor(units * j / count)) * unit) for j in range(count + 1)]
    return [(edges[j], edges[j + 1]) for j in range(count)]


def owners_of(members: Sequence[int], count: int) -> list[int]:
    """Each founder owns its slice; those of founders that are away go round the others."""
    turns = 0
    owners = []
    for j in range(count):
        if j in members:
            owners.append(j)
        else:
            owners.append(sorted(members)[turns % len(members)])
            turns += 1
    return owners


def encoded_again(
    wire: Wire, merged: np.ndarray, slot: Slot, owned: Owned, feedback: bool
) -> tuple[np.ndarray, Owned]:
    """What everybody takes for the merged delta, and the owners' residuals from then on (none without feedback)."""
    if wire.name == "fp32":
        return merged, {}
    result, after = np.empty_like(merged), {}
    owners = slot.owners()
    ranges = cut(merged.size, unit_of(wire), len(owners))
    for (start, stop), owner in zip(ranges, owners, strict=True):
        total = merged.copy()
        before = owned.get((start, stop))
        if before is not None and before[0] == owner:
            total[start:stop] = merged[start:stop] + before[1]
        # Blocks are encoded each for itself, so a slice is what it would be in the whole.
        seed = noise_seed(slot.run, slot.number, slot.fragments + slot.fragment, owner)
        taken = decode(wire, encode(wire, total, seed), total.size)[start:stop]
        result[start:stop] = taken
        if feedback and stop > start:
            after[start, stop] = (owner, total[start:stop] - taken)
    return result, after
