"""The islands that ``exchange.py`` compares: ours over the gloo transport, stock TorchFT's DiLoCo, and gloo alone.

Each runs in a process of its own, holds the same list of tensors, and does one slot when it is told to.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ISLANDS = 2
TIMEOUT = timedelta(seconds=60)
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEP = 1e-3  # how far an inner step moves a parameter, roughly


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model; the default has 50 million parameters in 199 tensors."""

    dim: int = 352
    hidden: int = 960
    layers: int = 28
    vocabulary: int = 11_000

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by name."""
        found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocabulary, self.dim)}
        for layer in range(self.layers):
            found |= {
                f"layers.{layer}.attention_norm.weight": (self.dim,),
                f"layers.{layer}.attention.wqkv.weight": (3 * self.dim, self.dim),
                f"layers.{layer}.attention.wo.weight": (self.dim, self.dim),
                f"layers.{layer}.ffn_norm.weight": (self.dim,),
                f"layers.{layer}.feed_forward.w1.weight": (self.hidden, self.dim),
                f"layers.{layer}.feed_forward.w2.weight": (self.dim, self.hidden),
                f"layers.{layer}.feed_forward.w3.weight": (self.hidden, self.dim),
            }
        return {**found, "norm.weight": (self.dim,), "output.weight": (self.vocabulary, self.dim)}

    def model(self) -> nn.Module:
        """The parameters alone; the same on every island."""
        generator = torch.Generator().manual_seed(0)
        root = nn.Module()
        for name, shape in self.tensors().items():
            *path, last = name.split(".")
            module = root
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            values = torch.randn(shape, generator=generator).mul_(0.02)
            module.register_parameter(last, nn.Parameter(values))
        return root


@dataclass(frozen=True, slots=True)
class Job:
    """What a process needs to be one island of one side. kind: "stock", "gloo" or a wire format of ours."""

    kind: str
    island: int
    shape: Shape
    folder: str
    lighthouse: str
    store: int
    fragments: int = 1


class Clock:
    """Where the time of a slot goes: seconds by what was done, from whatever threads."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - began

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Count every call of ``owner.name`` from now on."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.timed(what):
                return original(*arguments, **named)

        setattr(owner, name, timed)


class Island(ABC):
    """One island. ``slot`` is what is timed."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.clock = clock
        self.model = job.shape.model()
        generator = torch.Generator().manual_seed(1 + job.island)
        longest = max(p.numel() for p in self.model.parameters())
        self._noise = torch.randn(longest, generator=generator).mul_(STEP)
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.resident = (
            0  # bytes, once the parameters and every library are there, and nothing of an exchange yet
        )

    @torch.no_grad()
    def train(self) -> None:
        """Move the parameters, as inner steps do."""
        for parameter in self.model.parameters():
            parameter.add_(self._noise[: parameter.numel()].view_as(parameter))

    @abstractmethod
    def enter(self) -> None:
        """Find the other island. Both do so at the same time."""

    @abstractmethod
    def slot(self) -> int:
        """Exchange everything with the other island. Returns the bytes sent."""

    def close(self) -> None:  # noqa: B027 - gloo alone has nothing to say goodbye to
        """Leave."""


class Ours(Island):
    """The production path: the method, the gloo transport, a Lighthouse."""

    def __init__(self, job: Job, clock: Clock) -> None:
        super().__init__(job, clock)
        from torchtitan_diloco.config.own import (
            CodecConfig,
            IslandConfig,
            LighthouseConfig,
            OuterConfig,
            SemiSyncConfig,
            TransportConfig,
        )
        from torchtitan_diloco.exchange.gloo import GlooTransport
        from torchtitan_diloco.island.drain import DrainFlag
        from torchtitan_diloco.island.group import IslandGroup
        from torchtitan_diloco.island.parameters import IslandParameters
        from torchtitan_diloco.observe.events import Trace
        from torchtitan_diloco.outer.codec import make_codec
        from torchtitan_diloco.semi_sync import Setup, make_method

        self.resident = memory("VmRSS")
        group = IslandGroup()
        self.trace = Trace(Path(job.folder) / f"island-{job.island}", job.island, "first")
        self.method: Any = make_method(
            Setup(
                config=SemiSyncConfig(
                    sync_every=job.fragments,
                    fragments=job.fragments,
                    num_islands=ISLANDS,
                    outer=OuterConfig(**OUTER),  # type: ignore[arg-type]
                    codec=CodecConfig(wire=job.kind),
                ),
                steps=1_000_000,
                island=job.island,
                incarnation="first",
                started=0.0,
                run_id="exchange",
                group=group,
                parameters=IslandParameters([self.model], group),
                trace=self.trace,
                drain=DrainFlag(),
                make_transport=lambda merge: GlooTransport(
                    IslandConfig(id=job.island),
                    # Asked for once in 5 s: the other side, whose turn it is, should not feel it.
                    LighthouseConfig(address=job.lighthouse, quorum_interval_s=5.0),
                    TransportConfig(),
                    merge,
                ),
            )
        )
        watch(clock)
        self._codec = make_codec(job.kind)
        self.step = 0

    def enter(self) -> None:
        self.step = self.method.join(0)

    def slot(self) -> int:
        slot = self.method.next_slot
        self.step = self.method.after_inner_step(self.step + 1, 1000)
        index = self.method.clock.fragment_of(slot)
        assert self.method.next_slot == slot + 1 and not self.method.flights
        assert self.method.outer.states[index].version == 1 + slot // len(self.method.fragments)
        return self._codec.nbytes(self.method.fragments[index].numel)

    def close(self) -> None:
        self.method.leave("failure")  # at once, without staying for an island that may come back
        self.trace.close()


def watch(clock: Clock) -> None:
    """Time the parts of our slot."""
    from torchtitan_diloco.exchange.bulk import GlooBulk
    from torchtitan_diloco.island.parameters import IslandParameters
    from torchtitan_diloco.outer import state
    from torchtitan_diloco.semi_sync.wire import Wire

    clock.watch(Wire, "encode", "snapshot, delta and encoding")
    clock.watch(GlooBulk, "exchange", "wire")
    clock.watch(state, "_advance", "merge, outer step and digests")
    clock.watch(IslandParameters, "scatter", "scatter")


class Stock(Island):
    """torchft.local_sgd.DiLoCo under a torchft Manager, as its own hook drives it, the quorum beside."""

    def __init__(self, job: Job, clock: Clock) -> None:
        super().__init__(job, clock)
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ISLANDS,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=job.lighthouse,
            replica_id=f"stock_{job.island}",
            hostname="127.0.0.1",
            init_sync=False,
        )
        self.resident = memory("VmRSS")
        outer = torch.optim.SGD(self.model.parameters(), **OUTER)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self._diloco = DiLoCo(self.manager, [self.model], inner, outer, sync_every=1)
        self.bytes = (
            4 * self.numel
        )  # a ring of two sends every element once in each of its two phases, half each

    def enter(self) -> None: ...

    def slot(self) -> int:
        fragment = self._diloco._fragments[0]
        with self.clock.timed("quorum"):
            self.manager.start_quorum()
        with self.clock.timed("prepare_sync"):
            fragment.prepare_sync()
        with self.clock.timed("perform_sync"):
            committed = fragment.perform_sync()
        assert committed and self.manager.num_participants() == ISLANDS
        return self.bytes

    def close(self) -> None:
        self.manager.shutdown(wait=False)


class Gloo(Island):
    """TorchFT's process group alone: an all-gather of the float32 bytes, into memory that is there already."""

    def __init__(self, job: Job, clock: Clock) -> None:
        super().__init__(job, clock)
        from torchft.process_group import AllgatherOptions, ProcessGroupGloo

        self._options = AllgatherOptions
        self._group = ProcessGroupGloo(timeout=TIMEOUT)
        self._where = f"127.0.0.1:{job.store}/gloo", f"island_{job.island}", job.island
        self._mine = torch.zeros(4 * self.numel, dtype=torch.uint8)
        self._all = [torch.ones_like(self._mine) for _ in range(ISLANDS)]

    def enter(self) -> None:
        self._group.configure(*self._where, ISLANDS)

    def slot(self) -> int:
        self._group.allgather([self._all], [self._mine], self._options()).wait()
        return self._mine.nbytes


def serve(job: Job, orders: Connection) -> None:
    """Be an island: enter, then do as ordered, one order at a time, and answer each."""
    from torchtitan_diloco.process import die_with_parent

    die_with_parent()
    torch.set_num_threads(1)
    clock = Clock()
    make = {"stock": Stock, "gloo": Gloo}.get(job.kind, Ours)
    island = make(job, clock)
    island.enter()
    orders.send(island.numel)
    while (order := orders.recv()) != "end":
        if order == "train":
            island.train()
            clock.spent = {}
            orders.send(None)
        elif order == "slot":
            began, cpu_began = time.perf_counter(), time.process_time()
            sent = island.slot()
            wall, used = time.perf_counter() - began, time.process_time() - cpu_began
            orders.send((wall, used, sent, clock.spent))
        elif order == "forget peak":
            forget_peak()
            orders.send(None)
        elif order == "peak":
            orders.send(memory("VmHWM") - island.resident)
        else:
            orders.send(limits(island.numel))
    island.close()
    orders.send(None)


def limits(numel: int) -> dict[str, float]:
    """Seconds that a copy, a first touch and a SHA-256 of as many float32 values take here; best of three."""
    import hashlib

    source, target = torch.ones(2, numel)

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return {
        "copy": best(lambda: target.copy_(source)),
        "copy to fresh memory": best(source.clone),
        "sha256": best(lambda: hashlib.sha256(source.numpy().data)),
    }


def memory(field: str) -> int:
    """A size of this process from /proc, in bytes: VmRSS (now) or VmHWM (the highest since ``forget_peak``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> None:
    """VmHWM starts anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
