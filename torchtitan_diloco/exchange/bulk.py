"""Bulk over gloo: the payloads of one attempt, gathered through TorchFT's reconfigurable process group."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_diloco.exchange.control import bind
from torchtitan_diloco.exchange.messages import Member


class GlooBulk:
    """All-gathers one flat buffer among the members of an attempt.

    A group serves consecutive slots of the same members under the same epoch, a rule all of them apply alike. Its store is
    served by the lowest member; its prefix names the attempt, which is never repeated (that is a race in gloo's rendezvous).
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        from torchft.process_group import AllgatherOptions, ProcessGroupGloo

        self._group_class = ProcessGroupGloo
        self._options = AllgatherOptions
        self._timeout = timedelta(seconds=timeout_s)
        self._cached: tuple[tuple[str, int, tuple[Member, ...]], Any] | None = (
            None  # (epoch, next slot, members), group
        )
        # A socket of our own, which the store takes over: TCPStore by itself listens on every interface.
        listener = bind(host, 0)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=self._timeout,
            use_libuv=False,
        )
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def gather(
        self,
        me: Member,
        epoch: str,
        slot: int,
        members: tuple[Member, ...],
        store: str,
        payload: torch.Tensor,
    ) -> dict[int, torch.Tensor]:
        """Every member's payload (same length and dtype), by island. Blocks; raises RuntimeError when it fails."""
        if members == (me,):
            return {me.island: payload}
        cached, self._cached = self._cached, None
        if cached is not None and cached[0] == (epoch, slot, members):
            group = cached[1]
        else:
            group = self._group_class(timeout=self._timeout)
            group.configure(f"{store}/{epoch}/{slot}", f"island_{me.island}", members.index(me), len(members))
        gathered = [payload if m == me else torch.empty_like(payload) for m in members]
        outputs = [
            torch.empty_like(payload) if m == me else g for m, g in zip(members, gathered, strict=True)
        ]
        group.allgather([outputs], [payload], self._options()).wait()
        self._cached = ((epoch, slot + 1, members), group)
        return {m.island: g for m, g in zip(members, gathered, strict=True)}

    def forget(self) -> None:
        """The present group is of no more use; the next attempt sets up its own."""
        self._cached = None
