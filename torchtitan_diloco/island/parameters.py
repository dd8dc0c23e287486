"""The island's parameters as whole, named float32 tensors: gathered to the gateway, scattered from it.

Works for whatever layout the trainer chose (FSDP2, HSDP, TP, PP, together or alone, and one rank), because each rank
merely states which box of which tensor it holds. Names are canonical: TorchTitan's ``canonical_fqn`` of the parameter,
fused tensors as they are, so that islands may differ in activation checkpointing and in parallelism.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.group import GATEWAY, IslandGroup
from torchtitan_diloco.island.layout import Box, Layout, Report, UnsupportedLayout, box_of
from torchtitan_diloco.island.staging import Staging
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.fragments import Fragment, Piece
from torchtitan_diloco.outer.values import Flat, Strung


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


class IslandParameters:
    """Gather and scatter of the exchanged tensors of one island. All ranks call each method together.

    Raises UserError, on every rank, when the ranks' shards do not make up each tensor exactly once, or when torch
    cannot tell which part of a tensor a shard is (a layout that is not supported).
    """

    def __init__(self, model_parts: Iterable[nn.Module], group: IslandGroup) -> None:
        self.group = group
        model_parts = list(model_parts)
        self._sharded = [m for part in model_parts for m in part.modules() if isinstance(m, FSDPModule)]
        self._local: dict[str, torch.Tensor] = {}
        problems, holdings = [], {}
        for name, tensor in canonical_tensors(model_parts):
            if name in self._local:
                problems.append(f"two tensors are called {name}")
            self._local[name] = tensor
            try:
                holdings[name] = (tuple(tensor.shape), tensor.dtype, box_of(tensor))
            except UnsupportedLayout as problem:
                problems.append(f"{name} {problem}")
        reports: list[Report] = group.collect(Report.of(holdings, problems))
        layout = Layout.of(reports)
        if layout.problems:
            shown, more = layout.problems[:3], len(layout.problems) - 3
            raise UserError(
                f"parallelism: {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}: this layout cannot be "
                "exchanged with other islands; change the parallelism degrees of this island"
            )
        self.specs = layout.specs
        self._senders = layout.senders
        # The gateway cuts for everybody; the others only look after themselves.
        wanted = range(group.size) if group.is_gateway else [group.rank]
        self._boxes: dict[int, dict[str, Box]] = {rank: reports[rank].box_table() for rank in wanted}
        devices = {tensor.device for tensor in self._local.values()}
        self._staging = Staging(devices.pop() if len(devices) == 1 else torch.device("cpu"))

    def snapshot(self, fragment: Fragment, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The fragment's present values, float32, 1-D with ``fragment.numel`` elements; on the gateway only.

        out: filled and returned instead of a new tensor, whose first touch costs more than the gather itself.
        """
        if not self.group.is_gateway:
            shards = self._shards(fragment, self.group.rank, only_sent=True)
            if shards:
                self.group.send(self._fetched(shards), GATEWAY)
            return None
        flat = torch.empty(fragment.numel, dtype=torch.float32) if out is None else out
        views = dict(fragment.views(flat))
        mine = self._shards(fragment, GATEWAY, only_sent=True)
        present = (
            cut(self._fetched(mine), mine) if self._staging.staged else ((s, self._held(s)) for s in mine)
        )
        for shard, values in present:
            shard.inside.of(views[shard.piece]).copy_(values)
        for rank in range(1, self.group.size):
            shards = self._shards(fragment, rank, only_sent=True)
            if shards:
                buffer = self._buffer(shards)
                self.group.receive(buffer, rank)
                for shard, values in cut(buffer, shards):
                    shard.inside.of(views[shard.piece]).copy_(values)
        return flat

    def present(self, fragment: Fragment) -> Strung | None:
        """The fragment's present values, on the gateway only; to be read before training goes on.

        Where one rank holds all of them in memory that the CPU reads, they are read where they are, else gathered first.
        """
        if self.group.size == 1 and not self._staging.staged:
            return Strung([self._held(shard).reshape(-1) for shard in self._shards(fragment, GATEWAY)])
        flat = self.snapshot(fragment, buffers.empty(fragment.numel) if self.group.is_gateway else None)
        return None if flat is None else Flat(flat)

    @torch.no_grad()
    def scatter(self, fragment: Fragment, flat: torch.Tensor | None, alpha: float = 0.0) -> None:
        """Overwrite the fragment on all ranks with ``flat`` (as ``snapshot`` gives it; needed on the gateway only).

        With alpha, mix: alpha * present + (1 - alpha) * flat, float32, each operation rounded. Values are rounded to the
        dtype that the island trains in.
        """
        for module in self._sharded:
            module.reshard()  # FSDP would go on computing with whole copies that an evaluation has left behind
        mine = self._shards(fragment, self.group.rank)
        if not self.group.is_gateway:
            if mine:
                buffer = self._buffer(mine)
                self.group.receive(buffer, GATEWAY)
                self._put(cut(buffer, mine), alpha)
            return
        assert flat is not None
        views = dict(fragment.views(flat))
        for rank in range(1, self.group.size):
            shards = self._shards(fragment, rank)
            if shards:
                buffer = self._buffer(shards)
                for shard, values in cut(buffer, shards):
                    values.copy_(shard.inside.of(views[shard.piece]))
                self.group.send(buffer, rank)
        wanted = ((shard, shard.inside.of(views[shard.piece])) for shard in mine)
        self._put(self._staged(mine, wanted) if self._staging.staged else wanted, alpha)

    def _buffer(self, shards: list["Shard"]) -> torch.Tensor:
        """Room for the shards of one rank, until next time."""
        return self._staging.buffer(sum(shard.inside.numel for shard in shards))

    def _fetched(self, shards: list["Shard"]) -> torch.Tensor:
        """The present values of shards of this rank, one after the other, in host memory."""
        buffer = self._buffer(shards)
        with self._staging.fetching():
            for shard, values in cut(buffer, shards):
                values.copy_(self._held(shard), non_blocking=True)
        return buffer

    def _staged(self, shards: list["Shard"], wanted: Iterable["Held"]) -> Iterator["Held"]:
        """The same values in memory that an accelerator copies from by itself."""
        for (shard, staged), (_, values) in zip(cut(self._buffer(shards), shards), wanted, strict=True):
            staged.copy_(values)
            yield shard, staged

    def _held(self, shard: "Shard") -> torch.Tensor:
        """The values of a shard of this rank, as a view of what it trains."""
        return shard.of_local.of(local_part(self._local[shard.piece.spec.name]))

    def _put(self, wanted: Iterable["Held"], alpha: float) -> None:
        with self._staging.pushing():
            for shard, values in wanted:
                held = self._held(shard)
                if alpha:
                    values = held.to("cpu", torch.float32) * alpha + values * (1.0 - alpha)
                held.copy_(values, non_blocking=True)

    def _shards(self, fragment: Fragment, rank: int, only_sent: bool = False) -> list["Shard"]:
        """What a rank holds of a fragment, in the order of its pieces."""
        shards = []
        for piece in fragment.pieces:
            box = self._boxes[rank].get(piece.spec.name)
            if box is None or (only_sent and piece.spec.name not in self._senders[rank]):
                continue
            part = box.rows(piece.start, piece.stop)
            if part is not None and part.numel:
                local = Box(tuple(p - b for p, b in zip(part.offset, box.offset, strict=True)), part.shape)
                shards.append(Shard(piece, part.within(piece.start), local))
        return shards


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a piece that one rank holds: as a box inside the piece, and inside what the rank holds of the tensor."""

    piece: Piece
    inside: Box
    of_local: Box


Held = tuple[Shard, torch.Tensor]


def cut(buffer: torch.Tensor, shards: list[Shard]) -> Iterator[Held]:
    """Each shard's values as a view of a flat buffer that holds them one after the other."""
    offset = 0
    for shard in shards:
        yield shard, buffer[offset : offset + shard.inside.numel].view(shard.inside.shape)
        offset += shard.inside.numel
