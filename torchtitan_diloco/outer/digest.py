"""Digests of tensors and the hash chain that names a run's history."""

import hashlib
import json
from collections.abc import Iterable

import torch
import xxhash


def digest(flat: torch.Tensor) -> str:
    """SHA-256 (hex) of the bytes of a contiguous CPU tensor. Little-endian hosts only, as torch's own formats."""
    return hashlib.sha256(flat.detach().contiguous().numpy().view("uint8").data).hexdigest()


def checksum(flat: torch.Tensor) -> str:
    """XXH3-128 (hex) of the bytes of a contiguous CPU tensor: at the speed of memory, where SHA-256 takes ten times as long.

    It tells bits that differ by accident, not by intent.
    """
    return xxhash.xxh3_128_hexdigest(flat.detach().contiguous().numpy().view("uint8").data)


def is_finite(flat: torch.Tensor) -> bool:
    """Whether every element is finite, without a temporary of the tensor's size.

    min and max propagate NaN, so two reductions decide it.
    """
    if flat.numel() == 0:
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
