"""Fragments: which rows of which parameters are exchanged together, and where they lie in one flat buffer."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


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

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start : stop`` of a tensor, at elements ``offset : offset + numel`` of a fragment's flat buffer."""

    spec: TensorSpec
    offset: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The tensor's, with the range of rows if it is not all of them."""
        whole = self.start == 0 and self.stop == self.spec.rows
        return self.spec.name if whole else f"{self.spec.name}[{self.start}:{self.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed subset of the parameters that is exchanged together, as one flat buffer of ``numel`` elements."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece of the fragment as a view of ``flat`` (1-D, ``numel`` elements) in its own shape."""
        for piece in self.pieces:
            yield piece, flat[piece.slice].view(piece.shape)

    def flatten(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The inverse of ``views``: one new flat buffer from whole tensors by name."""
        flat = torch.empty(self.numel, dtype=dtype)
        for piece, view in self.views(flat):
            whole = tensors[piece.spec.name]
            view.copy_(whole[piece.start : piece.stop] if piece.spec.shape else whole)
        return flat


Rows = tuple[TensorSpec, int, int]
"""A tensor and a range of its rows."""


def _fragment(index: int, rows: Sequence[Rows]) -> Fragment:
    """In the order of names and rows, neighbouring ranges joined."""
    pieces: list[Piece] = []
    offset = 0
    for spec, start, stop in sorted(rows, key=lambda r: (r[0].name, r[1])):
        if pieces and pieces[-1].spec == spec and pieces[-1].stop == start:
            last = pieces.pop()
            start, offset = last.start, last.offset
        pieces.append(Piece(spec, offset, start, stop))
        offset += pieces[-1].numel
    return Fragment(index, tuple(pieces))


def _whole(specs: Sequence[TensorSpec]) -> list[Rows]:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"tensor names are not unique: {sorted(n for n in names if names.count(n) > 1)}")
    return [(spec, 0, spec.rows) for spec in specs]


def whole_model(specs: Sequence[TensorSpec]) -> tuple[Fragment, ...]:
    """The partition of plain DiLoCo: every tensor, in the order of the names, in one fragment."""
    return (_fragment(0, _whole(specs)),)


def balanced(specs: Sequence[TensorSpec], count: int) -> tuple[Fragment, ...]:
    """``count`` fragments of nearly equal size: largest first, each into the lightest (Decoupled DiLoCo, 2604.21428).

    A tensor larger than a fragment's share (an embedding) is cut by rows, into thirds of a share, so that the pieces fill
    up what whole tensors leave. No fragment is larger than 4/3 of the mean and a row, but for those that consist of whole
    tensors only, each larger than a third of a share. Raises ValueError when there are fewer tensors and rows than
    fragments.
    """
    share = math.ceil(sum(spec.numel for spec in specs) / count)
    items: list[Rows] = []
    for spec, _, rows in _whole(specs):
        cuts = min(rows, math.ceil(3 * spec.numel / share)) if spec.numel > share else 1
        items += [(spec, rows * i // cuts, rows * (i + 1) // cuts) for i in range(cuts)]

    def size(item: Rows) -> int:
        spec, start, stop = item
        return spec.numel * (stop - start) // max(1, spec.rows)

    bins: list[list[Rows]] = [[] for _ in range(count)]
    weight = [0] * count
    for item in sorted(items, key=lambda i: (-size(i), i[0].name, i[1])):
        lightest = min(range(count), key=lambda i: (weight[i], len(bins[i])))
        bins[lightest].append(item)
        weight[lightest] += size(item)
    return _checked(bins)


def by_layer(specs: Sequence[TensorSpec], count: int, strided: bool) -> tuple[Fragment, ...]:
    """Whole layers: layer i in fragment ``i mod count`` (strided) or in consecutive runs (Streaming DiLoCo, section 3).

    What comes before the layers (embeddings) goes with the first fragment, what comes after them with the last. Raises
    ValueError when there are fewer layers than fragments.
    """
    numbers = {spec.name: int(m[1]) for spec in specs if (m := LAYER.search(spec.name))}
    layers = sorted(set(numbers.values()))
    if len(layers) < count:
        most = f"use at most {len(layers)}, or " if layers else "set "
        raise ValueError(
            f'there are {len(layers)} layers for {count} fragments; {most}semi_sync.fragment_by = "tensor", which cuts any '
            "model"
        )
    place = {layer: (i % count if strided else i * count // len(layers)) for i, layer in enumerate(layers)}
    bins: list[list[Rows]] = [[] for _ in range(count)]
    for spec, start, stop in _whole(specs):
        layer = numbers.get(spec.name)
        outside = 0 if "embed" in spec.name else count - 1
        bins[outside if layer is None else place[layer]].append((spec, start, stop))
    return _checked(bins)


def by_modules(specs: Sequence[TensorSpec], modules: Sequence[Sequence[str]]) -> tuple[Fragment, ...]:
    """Explicit lists of module names, one list per fragment (TorchTitan's ``module_fqns_per_model_fragment``).

    Raises ValueError naming a tensor that is in no list or in two, or a module that is no part of the model.
    """
    bins: list[list[Rows]] = [[] for _ in modules]
    named = [m for names in modules for m in names]
    # First, since what a misspelled name leaves out would else be blamed for it.
    if unknown := [m for m in named if not any(f"{spec.name}.".startswith(f"{m}.") for spec in specs)]:
        there = ", ".join(dict.fromkeys(spec.name.partition(".")[0] for spec in specs))
        raise ValueError(
            f"the model has no module {', '.join(unknown)}; its modules are {there} and what is in them, such as layers.0"
        )
    for spec, start, stop in _whole(specs):
        owners = [
            (i, m) for i, names in enumerate(modules) for m in names if f"{spec.name}.".startswith(f"{m}.")
        ]
        if not owners:
            module = spec.name.rpartition(".")[0] or spec.name
            raise ValueError(f"{spec.name} is in no fragment; name its module, {module}, in one of the lists")
        if len(places := sorted({i for i, _ in owners})) > 1:
            by = " and ".join(dict.fromkeys(m for _, m in owners))
            raise ValueError(f"{spec.name} is in fragments {places}, by {by}; keep it in one of the lists")
        bins[owners[0][0]].append((spec, start, stop))
    return _checked(bins)


def _checked(bins: Sequence[Sequence[Rows]]) -> tuple[Fragment, ...]:
    empty = [i for i, rows in enumerate(bins) if not rows]
    if empty:
        raise ValueError(f"fragment {empty[0]} of {len(bins)} would be empty; use fewer fragments")
    return tuple(_fragment(i, rows) for i, rows in enumerate(bins))


def fingerprint(fragments: Sequence[Fragment]) -> str:
    """SHA-256 over names, shapes and the partition; islands whose fingerprints differ cannot exchange anything."""
    layout = [[[p.spec.name, list(p.spec.shape), p.start, p.stop] for p in f.pieces] for f in fragments]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()
