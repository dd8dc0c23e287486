"""Fragments: which rows of which parameters are exchanged together, and where they lie in one flat buffer."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One exchanged tensor of the unsharded model.

    name: canonical name (wrapper prefixes removed). shape: of the whole tensor. dtype: that the island trains in; the
    outer state is float32 whatever it says, so islands may differ in it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor inside a fragment's flat buffer, at elements ``offset : offset + spec.numel``."""

    spec: TensorSpec
    offset: int

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.spec.numel)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed subset of the parameters that is exchanged together, as one flat buffer of ``numel`` elements."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.spec.numel for piece in self.pieces)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Each tensor of the fragment as a view of ``flat`` (1-D, ``numel`` elements) in its own shape."""
        for piece in self.pieces:
            yield piece.spec, flat[piece.slice].view(piece.spec.shape)

    def flatten(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The inverse of ``views``: one new flat buffer from whole tensors by name."""
        flat = torch.empty(self.numel, dtype=dtype)
        for spec, view in self.views(flat):
            view.copy_(tensors[spec.name])
        return flat


def whole_model(specs: Sequence[TensorSpec]) -> tuple[Fragment, ...]:
    """The partition of plain DiLoCo: every tensor, in the order of the names, in one fragment."""
    pieces, offset = [], 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        pieces.append(Piece(spec, offset))
        offset += spec.numel
    names = [piece.spec.name for piece in pieces]
    if len(set(names)) != len(names):
        raise ValueError(f"tensor names are not unique: {sorted(n for n in names if names.count(n) > 1)}")
    return (Fragment(0, tuple(pieces)),)


def fingerprint(fragments: Sequence[Fragment]) -> str:
    """SHA-256 over names, shapes and the partition; islands whose fingerprints differ cannot exchange anything."""
    layout = [[[p.spec.name, list(p.spec.shape), p.offset] for p in f.pieces] for f in fragments]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()
