"""The island's parameters as whole, named float32 tensors: gathered to the gateway, scattered from it.

Works for whatever layout the trainer chose (FSDP2, TP, both, PP, EP, one rank), because each rank merely states which box
of which tensor it holds. Names are canonical: TorchTitan's ``canonical_fqn`` of the parameter, fused tensors as they are,
so that islands may differ in activation checkpointing and in parallelism.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.group import GATEWAY, IslandGroup
from torchtitan_diloco.outer.fragments import Fragment, TensorSpec


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that one rank holds: ``offset`` and ``shape`` per dimension, within the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This box of the whole tensor, as a view."""
        index = tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))
        return whole[index] if index else whole


def canonical_tensors(model_parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every exchanged tensor of this rank: parameters, and the persistent float buffers that training changes.

    Buffers count because some (the expert bias of mixture-of-experts layers) are updated outside the optimizer.
    """
    from torchtitan.components.checkpointer.utils import canonical_fqn

    for part in model_parts:
        for name, parameter in part.named_parameters():
            yield canonical_fqn(name), parameter
        for module_name, module in part.named_modules():
            for name, buffer in module._buffers.items():
                transient = name in module._non_persistent_buffers_set
                if buffer is not None and not transient and buffer.is_floating_point():
                    yield canonical_fqn(f"{module_name}.{name}" if module_name else name), buffer


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The storage this rank holds, without autograd."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.detach()


def box_of(tensor: torch.Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offset), tuple(shape))


class IslandParameters:
    """Gather and scatter of the exchanged tensors of one island. All ranks call each method together.

    Raises UserError when the ranks' shards do not tile a tensor exactly once (a layout that is not supported).
    """

    def __init__(self, model_parts: Iterable[nn.Module], group: IslandGroup) -> None:
        self.group = group
        self._local = dict(canonical_tensors(model_parts))
        mine = {name: (tuple(t.shape), t.dtype, box_of(t)) for name, t in self._local.items()}
        ranks: list[dict[str, tuple[tuple[int, ...], torch.dtype, Box]]] = group.collect(mine)
        self._boxes: list[dict[str, Box]] = [{name: box for name, (_, _, box) in rank.items()} for rank in ranks]
        self.specs: dict[str, TensorSpec] = {}
        for rank in ranks:
            for name, (shape, dtype, _) in rank.items():
                self.specs[name] = TensorSpec(name, shape, dtype)
        # Of ranks that hold the same box (replicas), the first one sends it.
        self._senders: list[set[str]] = [set() for _ in ranks]
        for name, spec in self.specs.items():
            taken: set[Box] = set()
            for boxes, sends in zip(self._boxes, self._senders, strict=True):
                box = boxes.get(name)
                if box is not None and box.numel and box not in taken:
                    taken.add(box)
                    sends.add(name)
            self._check_tiling(spec, taken)

    def snapshot(self, fragment: Fragment) -> torch.Tensor | None:
        """The fragment's present values, float32, 1-D with ``fragment.numel`` elements; on the gateway only."""
        if not self.group.is_gateway:
            self.group.send(self._pack(fragment, self.group.rank, only_sent=True), GATEWAY)
            return None
        flat = torch.empty(fragment.numel, dtype=torch.float32)
        for rank in range(self.group.size):
            if rank == GATEWAY:
                buffer = self._pack(fragment, rank, only_sent=True)
            else:
                buffer = torch.empty(self._length(fragment, rank, only_sent=True), dtype=torch.float32)
                self.group.receive(buffer, rank)
            for whole, box, values in self._split(fragment, rank, flat, buffer, only_sent=True):
                box.of(whole).copy_(values)
        return flat

    @torch.no_grad()
    def scatter(self, fragment: Fragment, flat: torch.Tensor | None) -> None:
        """Overwrite the fragment on all ranks with ``flat`` (as ``snapshot`` gives it; needed on the gateway only)."""
        if self.group.is_gateway:
            assert flat is not None
            for rank in range(self.group.size):
                buffer = torch.empty(self._length(fragment, rank), dtype=torch.float32)
                for whole, box, values in self._split(fragment, rank, flat, buffer):
                    values.copy_(box.of(whole))
                if rank == GATEWAY:
                    mine = buffer
                else:
                    self.group.send(buffer, rank)
        else:
            mine = torch.empty(self._length(fragment, self.group.rank), dtype=torch.float32)
            self.group.receive(mine, GATEWAY)
        offset = 0
        for name in self._names(fragment, self.group.rank):
            local = local_part(self._local[name])
            local.copy_(mine[offset : offset + local.numel()].view(local.shape))
            offset += local.numel()

    # ---- one rank's shards as one flat buffer, in the order of the fragment's pieces --------------------------------

    def _names(self, fragment: Fragment, rank: int, only_sent: bool = False) -> list[str]:
        held = self._senders[rank] if only_sent else self._boxes[rank]
        return [piece.spec.name for piece in fragment.pieces if piece.spec.name in held]

    def _length(self, fragment: Fragment, rank: int, only_sent: bool = False) -> int:
        return sum(self._boxes[rank][name].numel for name in self._names(fragment, rank, only_sent))

    def _pack(self, fragment: Fragment, rank: int, only_sent: bool) -> torch.Tensor:
        buffer = torch.empty(self._length(fragment, rank, only_sent), dtype=torch.float32)
        offset = 0
        for name in self._names(fragment, rank, only_sent):
            local = local_part(self._local[name])
            buffer[offset : offset + local.numel()].view(local.shape).copy_(local)
            offset += local.numel()
        return buffer

    def _split(
        self, fragment: Fragment, rank: int, flat: torch.Tensor, buffer: torch.Tensor, only_sent: bool = False
    ) -> Iterator[tuple[torch.Tensor, Box, torch.Tensor]]:
        """(whole tensor, box, that rank's values) for each shard in the rank's buffer."""
        wholes = {spec.name: view for spec, view in fragment.views(flat)}
        offset = 0
        for name in self._names(fragment, rank, only_sent):
            box = self._boxes[rank][name]
            yield wholes[name], box, buffer[offset : offset + box.numel].view(box.shape)
            offset += box.numel

    @staticmethod
    def _check_tiling(spec: TensorSpec, boxes: set[Box]) -> None:
        """The boxes cover each element exactly once: their sizes add up and no two overlap."""
        parts = sorted(boxes, key=lambda box: box.offset)
        overlap = any(
            all(a.offset[d] < b.offset[d] + b.shape[d] and b.offset[d] < a.offset[d] + a.shape[d] for d in range(len(spec.shape)))
            for i, a in enumerate(parts)
            for b in parts[i + 1 :]
        )
        if overlap or sum(box.numel for box in parts) != spec.numel:
            raise UserError(
                f"parallelism: the shards of {spec.name} {spec.shape} do not tile it exactly once, so this layout cannot be "
                "exchanged; change the parallelism degrees of this island"
            )
