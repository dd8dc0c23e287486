"""The ranks of one island as one group: small agreements between inner steps, flat buffers to and from the gateway."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GATEWAY = 0
"""The rank that holds the outer state and talks to other islands."""


class IslandGroup:
    """A gloo group of its own over all ranks of the island, beside whatever backend training uses.

    Its own, because the training groups' time-out is tightened after the first step, because CPU tensors cannot travel
    over a NCCL-only default group, and because the exchange must never queue between two collectives of the model.
    One rank needs no group (and no torch.distributed).
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1
        self._group: Any = None  # torch's stubs give new_group a union that its own collectives refuse
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_gateway(self) -> bool:
        return self.rank == GATEWAY

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank. All ranks must call it."""
        if self.size == 1:
            return flag
        value = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def tell(self, value: Any = None) -> Any:
        """The gateway's (small, picklable) value, on every rank. All ranks must call it.

        Within one job the ranks trust one another: this is the only place that pickles, and nothing of it leaves the island.
        """
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=GATEWAY, group=self._group)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def send(self, buffer: torch.Tensor, to: int) -> None:
        dist.send(buffer, group_dst=to, group=self._group)

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        dist.recv(buffer, group_src=source, group=self._group)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
