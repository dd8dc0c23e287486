"""The island's parameters as whole, named float32 tensors: gathered to the gateway, scattered from it.

Works for whatever layout the trainer chose (FSDP2, HSDP, TP, PP, together or alone, and one rank), because each rank
merely states which box of which tensor it holds. Names are canonical: TorchTitan's ``canonical_fqn`` of the parameter,
fused tensors as they are, so that islands may differ in activation checkpointing and in parallelism.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.group import GATEWAY, IslandGroup
from torchtitan_diloco.island.layout import Box, Layout, Report, UnsupportedLayout, box_of
from torchtitan_diloco.outer.fragments import Fragment


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
        self._scratch = torch.empty(0, dtype=torch.float32)

    def snapshot(self, fragment: Fragment, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The fragment's present values, float32, 1-D with ``fragment.numel`` elements; on the gateway only.

        out: filled and returned instead of a new tensor, whose first touch costs more than the gather itself.
        """
        if not self.group.is_gateway:
            self._send_shards(fragment)
            return None
        flat = torch.empty(fragment.numel, dtype=torch.float32) if out is None else out
        wholes = {spec.name: view for spec, view in fragment.views(flat)}
        for name in self._names(fragment, GATEWAY, only_sent=True):
            self._boxes[GATEWAY][name].of(wholes[name]).copy_(local_part(self._local[name]))
        for rank in range(1, self.group.size):
            length = self._length(fragment, rank, only_sent=True)
            if length == 0:
                continue
            buffer = self._buffer(length)
            self.group.receive(buffer, rank)
            for name, box, values in self._split(fragment, rank, buffer, only_sent=True):
                box.of(wholes[name]).copy_(values)
        return flat

    @torch.no_grad()
    def scatter(self, fragment: Fragment, flat: torch.Tensor | None) -> None:
        """Overwrite the fragment on all ranks with ``flat`` (as ``snapshot`` gives it; needed on the gateway only).

        Values are rounded to the dtype that the island trains in.
        """
        for module in self._sharded:
            module.reshard()  # FSDP would go on computing with whole copies that an evaluation has left behind
        if not self.group.is_gateway:
            self._receive_shards(fragment)
            return
        assert flat is not None
        wholes = {spec.name: view for spec, view in fragment.views(flat)}
        for rank in range(1, self.group.size):
            length = self._length(fragment, rank)
            if length == 0:
                continue
            buffer = self._buffer(length)
            for name, box, values in self._split(fragment, rank, buffer):
                values.copy_(box.of(wholes[name]))
            self.group.send(buffer, rank)
        for name in self._names(fragment, GATEWAY):
            local_part(self._local[name]).copy_(self._boxes[GATEWAY][name].of(wholes[name]))

    # ---- one rank's shards as one flat buffer, in the order of the fragment's pieces --------------------------------

    def _send_shards(self, fragment: Fragment) -> None:
        rank = self.group.rank
        buffer = self._buffer(self._length(fragment, rank, only_sent=True))
        for name, _, values in self._split(fragment, rank, buffer, only_sent=True):
            values.copy_(local_part(self._local[name]))
        if buffer.numel():
            self.group.send(buffer, GATEWAY)

    def _receive_shards(self, fragment: Fragment) -> None:
        rank = self.group.rank
        buffer = self._buffer(self._length(fragment, rank))
        if buffer.numel():
            self.group.receive(buffer, GATEWAY)
        for name, _, values in self._split(fragment, rank, buffer):
            local_part(self._local[name]).copy_(values)

    def _buffer(self, length: int) -> torch.Tensor:
        """Room for the shards of one rank, used again and again: fresh memory is several times slower than a copy."""
        if self._scratch.numel() < length:
            self._scratch = torch.empty(length, dtype=torch.float32)
        return self._scratch[:length]

    def _names(self, fragment: Fragment, rank: int, only_sent: bool = False) -> list[str]:
        held = self._senders[rank] if only_sent else self._boxes[rank]
        return [piece.spec.name for piece in fragment.pieces if piece.spec.name in held]

    def _length(self, fragment: Fragment, rank: int, only_sent: bool = False) -> int:
        return sum(self._boxes[rank][name].numel for name in self._names(fragment, rank, only_sent))

    def _split(
        self, fragment: Fragment, rank: int, buffer: torch.Tensor, only_sent: bool = False
    ) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """(name, box, values) for each shard in the rank's buffer."""
        offset = 0
        for name in self._names(fragment, rank, only_sent):
            box = self._boxes[rank][name]
            yield name, box, buffer[offset : offset + box.numel].view(box.shape)
            offset += box.numel
