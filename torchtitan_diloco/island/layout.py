"""Which part of which tensor each rank of an island holds, and the proof that the parts make up the whole.

Pure geometry on integers, so that it is tested without a process group and stays fast for a thousand ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_diloco.outer.fragments import TensorSpec


class UnsupportedLayout(Exception):
    """A tensor that is spread over the ranks in a way that cannot be gathered; the message completes a sentence."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that one rank holds: ``offset`` and ``shape`` per dimension, within the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> "Box | None":
        """The part of this box in rows ``start : stop`` of the whole tensor; None when there is none."""
        if not self.shape:
            return self
        first, last = max(start, self.offset[0]), min(stop, self.offset[0] + self.shape[0])
        if first >= last:
            return None
        return Box((first, *self.offset[1:]), (last - first, *self.shape[1:]))

    def within(self, offset: int) -> "Box":
        """This box counted from row ``offset`` of the whole tensor."""
        return Box((self.offset[0] - offset, *self.offset[1:]), self.shape) if self.shape else self

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This box of the whole tensor, as a view."""
        index = tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))
        return whole[index] if index else whole


def box_of(tensor: torch.Tensor) -> Box:
    """The box that this rank holds. Raises UnsupportedLayout where it holds no box, or torch cannot tell which."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    refuse_placements(tuple(tensor.shape), tuple(mesh.shape), placements)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    held = tuple(tensor.to_local().shape)
    if tuple(shape) != held:
        raise UnsupportedLayout(
            f"holds {held} on a rank where its placements {placements} say {tuple(shape)}"
        )
    return Box(tuple(offset), held)


def refuse_placements(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[object]) -> None:
    """Raises UnsupportedLayout for placements whose boxes torch gets wrong, or that are no boxes.

    A strided shard (FSDP over tensor parallelism) says "split by the mesh dimensions to my right first". Torch counts
    its elements from left to right, which names the same ones only where every split is even.
    """
    for placement in placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard) or isinstance(placement, Partial):
            raise UnsupportedLayout(f"is placed as {placement}")
    for dim, size in enumerate(shape):
        on_dim = [(p, n) for p, n in zip(placements, mesh, strict=True) if getattr(p, "dim", None) == dim]
        parts = math.prod(n for _, n in on_dim)
        if any(isinstance(p, _StridedShard) and n > 1 for p, n in on_dim) and size % parts:
            raise UnsupportedLayout(
                f"has {size} elements in dimension {dim}, which {parts} ranks cannot share evenly"
            )


Holdings = Mapping[str, tuple[tuple[int, ...], torch.dtype, Box]]
"""By name: shape of the whole tensor, dtype, and the box that a rank holds."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others of its tensors, in a form that is small and quick to pickle.

    tensors: (name, whole shape, dtype). boxes: int64, 1-D: for each tensor its offset, then its shape. problems: as
    sentences.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    boxes: np.ndarray
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, holdings: Holdings, problems: Sequence[str] = ()) -> "Report":
        tensors = tuple((name, shape, dtype) for name, (shape, dtype, _) in holdings.items())
        numbers = [n for _, _, box in holdings.values() for n in (*box.offset, *box.shape)]
        return cls(tensors, np.array(numbers, dtype=np.int64), tuple(problems))

    def box_table(self) -> dict[str, Box]:
        """The boxes by name."""
        table, column = {}, 0
        for name, shape, _ in self.tensors:
            dims = len(shape)
            offset, extent = self.boxes[column : column + dims], self.boxes[column + dims : column + 2 * dims]
            table[name] = Box(tuple(offset.tolist()), tuple(extent.tolist()))
            column += 2 * dims
        return table


@dataclass(frozen=True, slots=True)
class Layout:
    """All ranks' holdings. Of ranks that hold the same box (replicas), the lowest one sends it.

    specs: every tensor of the island. senders: per rank, the names of the tensors whose box it sends. problems: why
    this layout cannot be exchanged, as sentences (then there are no senders).
    """

    specs: dict[str, TensorSpec]
    senders: tuple[frozenset[str], ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> "Layout":
        """The layout from every rank's report, in rank order."""
        problems = list(dict.fromkeys(problem for report in reports for problem in report.problems))
        specs: dict[str, TensorSpec] = {}
        senders: list[set[str]] = [set() for _ in reports]
        held: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for ranks, stacked, tensors in _alike(reports):
            column = 0
            for name, shape, dtype in tensors:
                dims = len(shape)
                held.setdefault(name, []).append((ranks, stacked[:, column : column + 2 * dims]))
                column += 2 * dims
                spec = TensorSpec(name, shape, dtype)
                if specs.setdefault(name, spec) != spec:
                    problems.append(f"{name} is {specs[name].shape} on one rank and {shape} on another")
        if problems:
            return cls(specs, (), tuple(problems))
        for name, spec in specs.items():
            ranks = np.concatenate([ranks for ranks, _ in held[name]])
            order = np.argsort(ranks)
            boxes = np.concatenate([boxes for _, boxes in held[name]])[order]
            first = distinct(boxes)
            for rank in ranks[order][first].tolist():
                senders[rank].add(name)
            if not tiles(spec.shape, boxes[first]):
                problems.append(f"the shards of {name} {spec.shape} do not make it up exactly once")
        return cls(specs, () if problems else tuple(map(frozenset, senders)), tuple(problems))


def _alike(
    reports: Sequence[Report],
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]]:
    """(ranks, their boxes stacked, tensors) for each set of ranks that hold the same tensors (a pipeline stage)."""
    groups: dict[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], list[int]] = {}
    for rank, report in enumerate(reports):
        groups.setdefault(report.tensors, []).append(rank)
    for tensors, ranks in groups.items():
        yield np.array(ranks), np.stack([reports[rank].boxes for rank in ranks]), tensors


def distinct(boxes: np.ndarray) -> np.ndarray:
    """Row numbers, ascending, of the first of each set of equal boxes; empty boxes are left out.

    boxes: int64 (n, 2 * dims), each row an offset and a shape.
    """
    dims = boxes.shape[1] // 2
    filled = np.flatnonzero((boxes[:, dims:] > 0).all(axis=1))
    if dims == 0:
        return filled[:1]
    _, first = np.unique(boxes[filled], axis=0, return_index=True)
    return filled[np.sort(first)]


def tiles(shape: Sequence[int], boxes: np.ndarray) -> bool:
    """Whether the boxes (int64, (n, 2 * dims), none empty) cover each element of ``shape`` exactly once.

    By the inclusion-exclusion of corners: the difference, in every dimension, of a box's indicator function is +1 or
    -1 at its 2^dims corners and 0 elsewhere, and a function is determined by its differences. So the corners of all
    boxes must add up to those of the whole. Sorting the corners is all the work: O(n log n), exact, in any dimension.
    """
    dims = len(shape)
    if math.prod(shape) == 0 or dims == 0 or len(boxes) == 0:
        return len(boxes) == (math.prod(shape) > 0)
    start, stop = boxes[:, :dims], boxes[:, :dims] + boxes[:, dims:]
    if (start < 0).any() or (stop > np.array(shape)).any():
        return False
    whole = np.array([[0] * dims + list(shape)], dtype=np.int64)
    places, signs = zip(_corners(shape, boxes), _corners(shape, whole), strict=True)
    _, place = np.unique(np.concatenate(places), return_inverse=True)
    weights = np.concatenate((signs[0], -signs[1]))
    return not np.bincount(place, weights=weights).any()


def _corners(shape: Sequence[int], boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The boxes' corners as positions in a grid of ``shape`` plus one, and their signs; both 1-D."""
    dims = len(shape)
    places = np.zeros((len(boxes), 1), dtype=np.int64)
    signs = np.ones((len(boxes), 1))
    for dim in range(dims):
        ends = np.stack((boxes[:, dim], boxes[:, dim] + boxes[:, dims + dim]), axis=1)  # (n, 2)
        places = (places[:, :, None] * (shape[dim] + 1) + ends[:, None, :]).reshape(len(boxes), -1)
        signs = (signs[:, :, None] * np.array([1.0, -1.0])).reshape(len(boxes), -1)
    return places.ravel(), signs.ravel()
