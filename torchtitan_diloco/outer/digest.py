"""Digests of tensors and the hash chain that names a run's history."""

import hashlib
import json
from collections.abc import Iterable

import torch
import xxhash


class Checksum:
    """XXH3-128 of the bytes of a tensor that is seen piece by piece.

    As fast as memory, where SHA-256 takes ten times as long; it tells bits that differ by accident, not by intent.
    Little-endian hosts only, as torch's own formats.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, piece: torch.Tensor) -> None:
        """The next values, a contiguous CPU tensor."""
        self._state.update(piece.detach().numpy().view("uint8").data)

    def hex(self) -> str:
        """Of everything added so far."""
        return self._state.hexdigest()

    def digest(self) -> str:
        """The same as a digest, see ``digest``."""
        return hashlib.sha256(self._state.digest()).hexdigest()


def digest(flat: torch.Tensor) -> str:
    """What names an anchor: SHA-256 (hex) of the XXH3-128 of the bytes of a contiguous CPU tensor.

    Islands tell by it whether they hold the same bits. They trust one another with the run's weights, so the slower hash of
    all bytes would protect nobody.
    """
    checksum = Checksum()
    checksum.add(flat.contiguous())
    return checksum.digest()


def is_finite(flat: torch.Tensor) -> bool:
    """Whether every element is finite, without a temporary of the tensor's size.

    A finite sum has finite terms; where it is not, min and max decide, which propagate NaN.
    """
    if flat.numel() == 0 or torch.isfinite(flat.sum()):
        return True
    low, high = torch.aminmax(flat)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def link(
    lineage: str,
    slot: int,
    fragment: int,
    anchor_digest: str,
    participants: list[int],
    members: Iterable[int],
) -> str:
    """The next element of a run's lineage: a hash chain over its committed slots.

    members: all who take the result. If one of them commits and is lost, and the others do so in an attempt of their own, the
    anchor is the same where it did not contribute, but not what was settled of its data.
    """
    entry = json.dumps([lineage, slot, fragment, anchor_digest, participants, sorted(members)])
    return hashlib.sha256(entry.encode()).hexdigest()
