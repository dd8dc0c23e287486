"""Bulk over gloo: the payloads of one attempt, gathered through TorchFT's reconfigurable process group."""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_diloco.exchange.control import bind
from torchtitan_diloco.exchange.messages import Member
from torchtitan_diloco.exchange.pace import TokenBucket

CHUNK = 1 << 20  # elements in one collective: small enough to be paced, large enough to hide its latency
AHEAD = 4  # collectives under way at once, so that the link does not idle for a round trip after each


def serve_store(host: str, port: int, timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """A store that listens on ``host`` alone, for as long as it is held, and its address. port: 0 for a free one."""
    # A socket of our own, which the store takes over: TCPStore by itself listens on every interface.
    listener = bind(host, port)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timeout,
        use_libuv=False,
    )
    return store, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class GlooBulk:
    """All-gathers one flat buffer among the members of an attempt.

    Each fragment has a lane of its own, so that several slots move at once. A lane keeps its group for as long as the epoch
    lasts, all its members take part and no slot on it has ``failed``; a slot from which some are left out gets a group for
    itself. All members apply this rule alike. The store is served by the lowest member; no prefix is ever used twice (a
    race in gloo's rendezvous, and what a broken group has left there).
    """

    def __init__(self, host: str, timeout_s: float, max_rate: float) -> None:
        from torchft.process_group import AllgatherOptions, ProcessGroupGloo

        self._group_class = ProcessGroupGloo
        self._options = AllgatherOptions
        self._timeout = timedelta(seconds=timeout_s)
        self._bucket = TokenBucket(max_rate)
        self._kept: dict[int, tuple[int, str, Any]] = {}  # lane -> (slot that used it last, epoch, group)
        self._latest: dict[int, tuple[int, str]] = {}  # lane -> attempt that has begun last
        self._store, self.address = serve_store(host, 0, self._timeout)

    def gather(
        self, me: Member, attempt: tuple[int, str], lane: int, members: tuple[Member, ...], whole: bool,
        store: str, payload: torch.Tensor,
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """Every member's payload (same length and dtype), by island.

        attempt: slot and epoch. whole: all members of the epoch take part. store: where the lowest member serves it. Blocks;
        raises RuntimeError when it fails.
        """
        if members == (me,):
            return {me.island: payload}
        slot, epoch = attempt
        kept = self._kept.pop(lane, None) if whole else None
        self._latest[lane] = attempt
        if kept is not None and kept[1] == epoch:
            group = kept[2]
        else:
            group = self._group_class(timeout=self._timeout)
            prefix = f"{store}/{epoch}/slot-{slot}"
            group.configure(prefix, f"island_{me.island}", members.index(me), len(members))
        gathered = [payload if m == me else torch.empty_like(payload) for m in members]
        scratch = torch.empty_like(payload[:CHUNK])
        under_way: deque[Any] = deque()
        for start in range(0, payload.numel(), CHUNK):
            mine = payload[start : start + CHUNK]
            self._bucket.take(mine.nbytes * (len(members) - 1))
            parts = [
                scratch[: mine.numel()] if m == me else g[start : start + CHUNK]
                for m, g in zip(members, gathered, strict=True)
            ]
            under_way.append(group.allgather([parts], [mine], self._options()))
            if len(under_way) > AHEAD:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()
        if whole and self._latest[lane] == attempt:  # else given up long ago, and another has the lane
            self._kept[lane] = (slot, epoch, group)
        return {m.island: g for m, g in zip(members, gathered, strict=True)}

    def failed(self, slot: int) -> None:
        """The slot will not commit: to some members its group may be broken, so nobody uses it again."""
        self._kept = {lane: kept for lane, kept in self._kept.items() if kept[0] != slot}

    def close(self) -> None:
        self._kept = {}
