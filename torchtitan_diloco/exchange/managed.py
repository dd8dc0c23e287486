"""``Lockstep`` over TorchFT: its Manager for quorums and errors, gloo for the sums, and votes so that all or none step.

The Manager alone commits per island: one may step where another has not. So a step is taken only after a vote inside the
group, and ``should_commit``, which follows it, merely spreads the answer over the island's ranks and makes the Lighthouse
name a new quorum after a failure. The Manager's healing (pickles over HTTP) is not used.

Importing this imports torchft.
"""

import logging
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceOp
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo, create_store_client

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig
from torchtitan_diloco.exchange.groups import group_on
from torchtitan_diloco.exchange.lockstep import Cost, Lockstep

logger = logging.getLogger(__name__)

REACH_S = 10.0  # how long the Lighthouse may take to answer
QUORUM_RETRIES = 40  # a request under way when the Lighthouse dies is lost; the ManagerServer then asks again
CONNECT_S = 20.0  # a member that was there a moment ago connects within seconds, or is gone


def quieten() -> None:
    """One line a step, and a stack trace for each peer that dies, are too much; what matters is said here."""
    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The group that a quorum stands for. ranks: global ones, by which TorchFT tells the members apart."""

    prefix: str
    replica_id: str
    rank: int
    size: int
    quorum: int
    group_rank: int
    group_size: int
    ranks: tuple[int, ...]

    @property
    def islands(self) -> tuple[int, ...]:
        """Ids, in the group's order; the same on all islands, whereas ranks depend on how many an island has."""
        return tuple(rank // self.group_size for rank in self.ranks)


class LateGroup(ProcessGroupGloo):  # type: ignore[misc]
    """Notes which group the Manager wants, and is made when ``connect`` is called: once the members are known to fit.

    A member with fewer ranks than this island has none to connect to, for the whole of the time-out. listen: the address of
    this rank's node that its counterparts dial.
    """

    def __init__(self, timeout: timedelta, listen: str) -> None:
        super().__init__(timeout=timeout)
        self._listen = listen
        self.wanted: Wanted | None = None
        self.connected = False

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int | None = None,
        group_rank: int | None = None, group_world_size: int | None = None, global_ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        assert quorum_id is not None and group_rank is not None and group_world_size is not None
        wanted = Wanted(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size,
            tuple(global_ranks or ()),
        )  # fmt: skip
        # The prefix alone may change, with who is furthest: it holds the address of that island's store. Connections
        # outlive that, but the next ones are made through the new one, as on all other islands.
        if self.wanted is None or replace(wanted, prefix=self.wanted.prefix) != self.wanted:
            self.hang_up()
        self.wanted = wanted

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return group_on(self._listen, store, rank, world_size, self._timeout)

    def connect(self) -> None:
        """Raises RuntimeError when some member does not come."""
        wanted, timeout = self.wanted, self._timeout
        assert wanted is not None
        if self.connected:
            return
        self.set_timeout(timedelta(seconds=min(CONNECT_S, timeout.total_seconds())))
        try:
            # Quorum ids begin again with the Lighthouse, and a prefix must never come again (gloo would read the
            # addresses of the dead): those who arrive count themselves.
            prefix = f"{wanted.prefix}/{','.join(map(str, wanted.islands))}"
            store = create_store_client(prefix, self._timeout)
            round_ = (store.add("arrived", 1) - 1) // wanted.size
            super().configure(
                f"{prefix}/{round_}", wanted.replica_id, wanted.rank, wanted.size,
                wanted.quorum, wanted.group_rank, wanted.group_size, list(wanted.ranks),
            )  # fmt: skip
        except Exception as error:
            raise RuntimeError(f"quorum {wanted.quorum}: {_first_line(error)}") from error
        finally:
            self.set_timeout(timeout)
        self.connected = True

    def require(self) -> None:
        """Raises RuntimeError when there are no connections."""
        if not self.connected:
            raise RuntimeError("this rank has hung up")

    def hang_up(self) -> None:
        self.abort(errored=False)
        self.connected = False


class ManagedLockstep(Lockstep):
    """One rank of one island.

    store: "host:port" of the island's own store, which peers reach too (``serve_store``; fresh for each incarnation: the
    Manager's keys in it name one start). host: what this island's ManagerServer, on rank 0, is said to be reached at; it
    listens on every interface, which TorchFT leaves no choice about. listen: the address of this rank's node for its sums.
    """

    def __init__(
        self, *, rank: int, ranks: int, store: str, host: str, listen: str, island: IslandConfig,
        lighthouse: LighthouseConfig, timeout_s: float, held: object = None,
    ) -> None:  # fmt: skip
        """held: the store itself, where this rank serves it. Raises what TorchFT does when no Lighthouse answers."""
        quieten()
        self.patience_s = lighthouse.patience_s
        self.cost = Cost()
        self._held = held
        self._group = LateGroup(timedelta(seconds=timeout_s), listen)
        address, _, port = store.rpartition(":")
        self._manager: Any = Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timedelta(seconds=timeout_s),
            quorum_timeout=timedelta(seconds=timeout_s),
            quorum_retries=QUORUM_RETRIES,
            connect_timeout=timedelta(seconds=REACH_S),
            rank=rank,
            world_size=ranks,
            store_addr=address.strip("[]"),
            store_port=int(port),
            lighthouse_addr=lighthouse.address,
            replica_id=f"island_{island.id}",
            hostname=f"[{host}]" if ":" in host else host,
            heartbeat_interval=timedelta(seconds=lighthouse.heartbeat_interval_s),
            init_sync=False,
            checkpoint_transport=NoTransport(),
        )
        self._managed = ManagedProcessGroup(self._manager)
        self._closed = False

    def ask(self, step: int) -> bool:
        # Public, and the only way to tell the Manager where the run stands.
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        # Numbers begin again with the Lighthouse, so an equal one need not be the same quorum: let ``configure`` compare.
        self._manager._quorum_id = -1
        try:
            self._manager.start_quorum(allow_heal=False)
        except Exception as error:  # noqa: BLE001 - time-outs and lost connections have many types
            logger.debug("no quorum: %s", _first_line(error))
            # Without this, every later start_quorum raises the old error again (torchft 0.2.0).
            self._manager._quorum_future = None
            return False
        if not self._level:
            # Somebody was away, perhaps in a group of its own: what is left of this one is not to be trusted.
            self._group.hang_up()
        return True

    @property
    def _level(self) -> bool:
        """Whether all islands of the quorum stand at the same step."""
        assert self._group.wanted is not None
        return bool(self._manager.num_participants() == self._group.wanted.size)

    @property
    def is_new(self) -> bool:
        return not self._group.connected or not self._level

    @property
    def islands(self) -> tuple[int, ...]:
        wanted = self._group.wanted
        assert wanted is not None
        return wanted.islands

    def connect(self) -> None:
        self._group.connect()

    def gather(self, message: bytes) -> list[bytes]:
        self._group.require()
        size = len(self.islands)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        self._group.allgather([lengths], [torch.tensor([len(message)])], AllgatherOptions()).wait()
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        texts = [torch.empty_like(mine) for _ in range(size)]
        self._group.allgather([texts], [mine], AllgatherOptions()).wait()
        return [bytes(t[: int(n)].numpy()) for t, n in zip(texts, lengths, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._group.require()
        options = BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([tensor], options).wait()

    def average(self, tensor: torch.Tensor) -> None:
        size = len(self.islands)
        if size == 1 or self.errored:
            return
        began = time.monotonic()
        options = AllreduceOptions()
        options.reduceOp = (
            ReduceOp.AVG
        )  # to the Manager; what travels is a sum, which is all that gloo can do
        # Waited for on the stream it was issued on, as a managed work must be.
        self._managed.allreduce([tensor], options).wait()
        self.cost.seconds += time.monotonic() - began
        self.cost.sent += 2 * (size - 1) * tensor.nbytes // size  # gloo's ring

    def vote(self, ballot: torch.Tensor) -> torch.Tensor:
        self._group.require()
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        counted = ballot.clone()
        self._group.allreduce([counted], options).wait()
        return counted

    @property
    def errored(self) -> bool:
        return self._manager.errored() is not None

    def fail(self, reason: str) -> None:
        self._manager.report_error(RuntimeError(reason))
        self._group.hang_up()

    def commit(self) -> bool:
        return bool(self._manager.should_commit())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._group.hang_up()
            self._manager.shutdown(wait=False)


class NoTransport:
    """Stands where the Manager wants a way to send checkpoints; its own would listen on every interface, and unpickle."""

    def metadata(self) -> str:
        return ""

    def disallow_checkpoint(self) -> None:
        pass

    def shutdown(self, wait: bool = True) -> None:
        pass


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
