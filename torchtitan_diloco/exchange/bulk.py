"""Bulk over gloo: what the members of one attempt send one another, through TorchFT's reconfigurable process group."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_diloco.exchange.attempt import Bulk
from torchtitan_diloco.exchange.groups import make_group_class
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.exchange.traffic import Traffic
from torchtitan_diloco.listening import bind
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.policy import Member

CHUNK = 1 << 20  # bytes in one message: small enough to be paced, large enough to cost no time by itself
SMALL = 256 << 10  # bytes; a part is not cut into smaller messages so that every stream gets some
AHEAD = 4  # messages handed to gloo for each connection, so that it never runs dry
CUT_S = 1.0  # from an abandoned attempt to the end of its connections: who is alive has left it by then
AT_ONCE = timedelta(milliseconds=1)  # the shortest wait: 0 means the time-out of the group


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


def _arrived(receives: Iterable[tuple[tuple[int, int], Any, int]]) -> int:
    """Bytes of the complete ones, of (sender and stream, work, bytes) in broken groups; of each, they are so in order."""
    total, over = 0, set()
    for connection, work, size in receives:
        if connection in over:
            continue
        try:
            work.wait(AT_ONCE)
            total += size
        except RuntimeError:
            over.add(connection)
    return total


def _end(groups: list[Any]) -> None:
    for group in groups:
        group.cut()


class GlooBulk:
    """Lets the members of an attempt send each of the others a part: of an all-gather, or slices and what becomes of them.

    By messages from each to each: gloo's own all-gather sends as much, but copies everything twice more.

    Each fragment has a lane of its own, so that several slots move at once. A lane is ``streams`` groups, to which messages
    are dealt in turn. It keeps them for as long as the epoch lasts, all its members take part and no slot on it has
    ``failed``; a slot from which some are left out gets groups for itself. The stages of an attempt share them. All members
    apply these rules alike. The store is served by the lowest member; no prefix is ever used twice (a race in gloo's
    rendezvous, and what a broken group has left there).
    """

    def __init__(
        self,
        host: str,
        timeout_s: float,
        max_rate: float,
        traffic: Traffic,
        streams: int = 1,
        stood_still: Callable[[], bool] = lambda: False,
    ) -> None:
        """stood_still: whether this process was frozen until now for so long that the others have gone on without it."""
        self._group_class = make_group_class(host)
        self._timeout = timedelta(seconds=timeout_s)
        self._bucket = TokenBucket(max_rate)
        self._traffic = traffic
        self._streams = streams
        self._stood_still = stood_still
        # By lane: slot that used the groups last, epoch, groups; attempt that has a stage to come, groups; latest attempt.
        self._kept: dict[int, tuple[int, str, list[Any]]] = {}
        self._between: dict[int, tuple[tuple[int, str], list[Any]]] = {}
        self._latest: dict[int, tuple[int, str]] = {}
        self._abandoned: set[tuple[int, str]] = set()
        self._under_way: dict[tuple[int, str], list[Any]] = {}  # the groups of attempts that a thread is in
        self._store, self.address = serve_store(host, 0, self._timeout)

    def exchange(self, me: Member, bulk: Bulk, store: str) -> dict[int, torch.Tensor]:
        """What every member sends this island, by island.

        store: where the lowest member serves it. Blocks; raises RuntimeError when it fails.
        """
        if bulk.members == (me,):
            return {me.island: bulk.sends[0]}
        self._under_way[bulk.attempt] = []
        try:
            groups = self._begin(me, bulk, store)
            self._under_way[bulk.attempt] = groups
            parts = self._send(groups, me, bulk)
        finally:
            del self._under_way[bulk.attempt]
            self._abandoned.discard(bulk.attempt)
        if self._latest[bulk.fragment] == bulk.attempt:  # else given up long ago, and another has the lane
            if bulk.stage == "slices":
                self._between[bulk.fragment] = (bulk.attempt, groups)
            elif bulk.whole:
                self._kept[bulk.fragment] = (*bulk.attempt, groups)
        return {m.island: part for m, part in zip(bulk.members, parts, strict=True)}

    def _begin(self, me: Member, bulk: Bulk, store: str) -> list[Any]:
        """The groups for a stage of an attempt."""
        lane, (slot, epoch) = bulk.fragment, bulk.attempt
        if bulk.stage == "merged":
            attempt, groups = self._between.pop(lane, (None, []))
            if attempt != bulk.attempt:
                raise RuntimeError("given up between two stages")
            return groups
        self._between.pop(lane, None)
        kept = self._kept.pop(lane, None) if bulk.whole else None
        self._latest[lane] = bulk.attempt
        if kept is not None and kept[1] == epoch:
            return kept[2]
        return self._configured(f"{store}/{epoch}/slot-{slot}", me, bulk)

    def _configured(self, prefix: str, me: Member, bulk: Bulk) -> list[Any]:
        """New groups, made side by side: one after another, each would cost a long link ten round trips more."""
        groups = [self._group_class(timeout=self._timeout) for _ in range(self._streams)]
        self._under_way[bulk.attempt] = groups
        errors: list[RuntimeError] = []

        def configure(stream: int) -> None:
            try:
                groups[stream].configure(
                    f"{prefix}/{stream}", f"island_{me.island}", bulk.members.index(me), len(bulk.members)
                )
            except RuntimeError as error:
                errors.append(error)

        # Not a pool: the end of the program would wait for its threads, and a frozen peer for the whole time-out.
        threads = [
            threading.Thread(target=configure, args=(stream,), daemon=True, name=f"stream-{stream}")
            for stream in range(self._streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return groups

    def _cut(self, part: torch.Tensor) -> list[torch.Tensor]:
        """A part as messages; both ends know its size, so they cut it alike."""
        size = min(CHUNK, max(SMALL, -(-part.numel() // self._streams)))
        return [part[start : start + size] for start in range(0, part.numel(), size)]

    def _send(self, groups: list[Any], me: Member, bulk: Bulk) -> list[torch.Tensor]:
        """To each member its part, for the part that it sends this island; in their order, of any lengths."""
        mine = bulk.members.index(me)
        others = [rank for rank in range(len(bulk.members)) if rank != mine]
        sends = list(bulk.sends)
        parts = [
            sends[mine] if rank == mine else buffers.empty(size, torch.uint8)
            for rank, size in enumerate(bulk.sizes)
        ]
        slot = bulk.attempt[0]
        # All of them before the first byte leaves: gloo sends nothing that it has not been asked for, and asks on the same
        # connection. Asked for later, a chunk waits until what is queued there has crossed the link the other way.
        coming = deque(
            ((rank, number % len(groups)), groups[number % len(groups)].recv([piece], rank, 0), piece.nbytes)
            for rank in others
            for number, piece in enumerate(self._cut(parts[rank]))
        )
        try:
            under_way: deque[Any] = deque()
            for number, pieces in enumerate(zip_longest(*(self._cut(sends[rank]) for rank in others))):
                going = [(rank, p) for rank, p in zip(others, pieces, strict=True) if p is not None]
                size = sum(piece.nbytes for _, piece in going)
                self._bucket.take(size)  # which may take seconds, so what has happened meanwhile counts
                if bulk.attempt in self._abandoned or self._stood_still():
                    raise RuntimeError("given up")
                self._traffic.add(slot, sent=size)
                group = groups[number % len(groups)]
                under_way += [group.send([piece], rank, 0) for rank, piece in going]
                while len(under_way) > AHEAD * len(groups) * len(others):
                    under_way.popleft().wait()
            while under_way:
                under_way.popleft().wait()
            while coming:
                coming[0][1].wait()
                self._traffic.add(slot, received=coming.popleft()[2])
        except RuntimeError:
            self._traffic.add(slot, received=_arrived(coming))
            raise
        return parts

    def abandon(self, attempt: tuple[int, str]) -> None:
        """Send nothing more of it: its successor needs the link. A little later nobody can: its connections are cut.

        A member that is frozen, or cut off, would keep this island's thread and buffers for the whole time-out otherwise,
        and go on sending when it is back.
        """
        self._abandoned.add(attempt)
        if attempt in self._under_way:
            timer = threading.Timer(CUT_S, _end, [self._under_way[attempt]])
            timer.daemon = True
            timer.start()

    def interrupt(self) -> None:
        """End all that is under way, at once."""
        for groups in list(self._under_way.values()):
            _end(groups)

    def settled(self, slot: int) -> None:
        """No attempt at the slot will come any more; a thread that is still in one has yet to see that it was given up."""
        self._abandoned -= {a for a in self._abandoned if a[0] == slot and a not in self._under_way}

    def failed(self, slot: int) -> None:
        """The slot will not commit: to some members its group may be broken, so nobody uses it again."""
        self._kept = {lane: kept for lane, kept in self._kept.items() if kept[0] != slot}
        self._between = {lane: held for lane, held in self._between.items() if held[0][0] != slot}

    def close(self) -> None:
        self._kept, self._between = {}, {}
