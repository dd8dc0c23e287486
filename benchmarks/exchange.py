"""What one slot costs: two islands on loopback, ours over TorchFT's stock ``DiLoCo`` on the same tensors.

    python benchmarks/exchange.py                       # fp32 and int8 against stock: about 3 minutes, 10 GB
    python benchmarks/exchange.py --cost                # CPU seconds per exchanged MB of every codec: about 2 minutes

A Llama-like model of 50 million parameters in 199 tensors, one fragment, no overlap: training stands still for the slot.
Ours is the production path (method, gloo transport, a Lighthouse; snapshot to scatter, all digests); stock is
``prepare_sync`` and ``perform_sync`` of ``torchft.local_sgd.DiLoCo`` under a ``Manager``. Its quorum is shown beside and
not counted. Every island is a process of its own with one torch thread.

Paired, because a machine's speed drifts: the sides take turns, one slot each, A B B A B A A B ... A slot takes as long as
on the slower of its two islands. Reported: the median ratio of neighbouring slots, with a 95 % bootstrap interval.
The physical limits beside it (plain gloo, one pass over memory, SHA-256) are measured on both islands at once, too.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from exchange_sides import ISLANDS, Job, Shape, serve
from paired import interval, machine, order_of_turns, require_counts

TARGETS = {"fp32": 0.7, "int8": 0.5}
"""Seconds of our slot over stock's, by wire format."""

WIRES = ("fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk")
WARM_UP_SLOTS = 3  # momentum is there, and every buffer has been used
MB = 1e6


class Slot(NamedTuple):
    """One slot: wall seconds of the slower island; CPU seconds of an island; bytes it sent; its seconds by part."""

    wall: float
    cpu: float
    sent: int
    parts: dict[str, float]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wire", default="fp32,int8", help="wire formats to compare with stock")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of slots for each")
    parser.add_argument("--cost", action="store_true", help="CPU seconds per MB instead, of every codec")
    parser.add_argument("--layers", type=int, default=Shape().layers, help="of the model")
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "pairs", "layers")
    arguments.wire = arguments.wire.split(",")
    if unknown := [wire for wire in arguments.wire if wire not in WIRES]:
        parser.error(f"--wire {unknown[0]}: choose from {', '.join(WIRES)}")
    return arguments


class Side:
    """Two islands that exchange with each other."""

    def __init__(self, kind: str, shape: Shape, folder: str) -> None:
        from torch.distributed import TCPStore
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
        address = f"http://127.0.0.1:{self._lighthouse.address().rsplit(':', 1)[1]}"
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._orders: list[Connection] = []
        for island in range(ISLANDS):
            here, there = context.Pipe()
            job = Job(kind, island, shape, f"{folder}/{kind}", address, self._store.port)
            process = context.Process(target=serve, args=(job, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._orders.append(here)
        self.numel: int = self._collect()[0]
        for _ in range(WARM_UP_SLOTS):
            self.turn()

    def ask(self, order: str) -> list[Any]:
        """The islands' answers. They work at the same time."""
        for orders in self._orders:
            orders.send(order)
        return self._collect()

    def _collect(self) -> list[Any]:
        return [orders.recv() for orders in self._orders]

    def turn(self) -> Slot:
        self.ask("train")
        walls, cpus, sent, parts = zip(*self.ask("slot"), strict=True)
        mean = {name: statistics.mean(p.get(name, 0.0) for p in parts) for name in parts[0]}
        return Slot(max(walls), statistics.mean(cpus), sent[0], mean)

    def peak(self) -> int:
        """Bytes of the larger island above its parameters during a slot."""
        self.ask("forget peak")
        self.turn()
        return max(self.ask("peak"))

    def close(self) -> None:
        """End the islands; all at once if one of them does not answer any more."""
        with contextlib.suppress(EOFError, OSError):
            self.ask("end")
        for process in self._processes:
            process.kill()
            process.join()
        self._lighthouse.shutdown()


@contextlib.contextmanager
def sides(kinds: Sequence[str], shape: Shape) -> Iterator[list[Side]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = []
        for kind in kinds:
            made.append(Side(kind, shape, folder))
            stack.callback(made[-1].close)
        yield made


def median_parts(slots: Sequence[Slot]) -> dict[str, float]:
    """Median seconds of each part, and under "everything else" what is left of the median slot."""
    parts = {name: statistics.median(s.parts.get(name, 0.0) for s in slots) for name in slots[0].parts}
    return {**parts, "everything else": statistics.median(s.wall for s in slots) - sum(parts.values())}


def judge(low: float, high: float, limit: float) -> str:
    """What the interval of a ratio that should be small says about its limit."""
    if high <= limit:
        return "met"
    return "MISSED" if low > limit else "not resolved: the interval holds it"


def cost(slots: Sequence[Slot]) -> float:
    """Median CPU seconds of one island for each MB that it sends."""
    return statistics.median(s.cpu / (s.sent / MB) for s in slots)


# ---- the two measurements --------------------------------------------------------------------------------------------


def compare(wire: str, arguments: argparse.Namespace, shape: Shape) -> None:
    """Print ours, with one wire format, over stock."""
    with sides(["stock", wire, "gloo"], shape) as (stock, ours, gloo):
        slots: tuple[list[Slot], list[Slot]] = ([], [])
        for turns in order_of_turns(arguments.pairs):
            for side in turns:
                slots[side].append((stock, ours)[side].turn())
        plain = [gloo.turn() for _ in range(5)]
        limits = gloo.ask("limits")
        peaks = stock.peak(), ours.peak()
    quorums = [s.parts.pop("quorum") for s in slots[0]]
    theirs = [s.wall - q for s, q in zip(slots[0], quorums, strict=True)]
    ratios = [b.wall / a for a, b in zip(theirs, slots[1], strict=True)]
    low, high = interval(ratios)
    sent = slots[1][0].sent
    print(f"\n== {wire}: {stock.numel / 1e6:.1f}M parameters, {sent / MB:.0f} MB sent by each island")
    print(
        f"stock: {statistics.median(theirs):.3f} s, and its quorum {1000 * statistics.median(quorums):.1f} ms"
    )
    print(f"ours:  {statistics.median(s.wall for s in slots[1]):.3f} s")
    for name, seconds in median_parts(slots[1]).items():
        print(f"    {name:30} {1000 * seconds:7.1f} ms")
    print(
        f"ratio: {statistics.median(ratios):.3f}  (95 % interval {low:.3f} to {high:.3f}, {len(ratios)} pairs)"
    )
    if wire in TARGETS:
        print(f"ratio <= {TARGETS[wire]}: {judge(low, high, TARGETS[wire])}")
    used = [statistics.median(s.cpu for s in side) for side in slots]
    print(f"CPU seconds of one island: {used[1]:.3f}, stock {used[0]:.3f}")
    whole = 4 * stock.numel
    print(f"peak memory above the parameters: {peaks[1] / whole:.2f}x of them, stock {peaks[0] / whole:.2f}x")
    seconds = statistics.median(s.wall for s in plain)
    print(f"limits: plain gloo {seconds * sent / plain[0].sent:.3f} s for {sent / MB:.0f} MB", end="")
    for name in limits[0]:
        print(f", {name} {max(answer[name] for answer in limits):.3f} s", end="")
    print(f" for {whole / MB:.0f} MB")


def costs(arguments: argparse.Namespace, shape: Shape) -> None:
    """Print the CPU seconds per MB of every codec, plain gloo and stock."""
    print(f"\n{'':24} {'MB sent':>8} {'CPU s a slot':>13} {'CPU ms / MB':>12} {'slot s':>8}")
    for kind in ("gloo", "stock", *WIRES):
        with sides([kind], shape) as (side,):
            slots = [side.turn() for _ in range(max(3, arguments.pairs // 4))]
        name = {"gloo": "plain gloo, float32", "stock": "stock DiLoCo, float32"}.get(kind, f"ours, {kind}")
        cpu, wall = (statistics.median(getattr(s, field) for s in slots) for field in ("cpu", "wall"))
        print(f"{name:24} {slots[0].sent / MB:8.1f} {cpu:13.3f} {1000 * cost(slots):12.2f} {wall:8.3f}")


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RUST_LOG", "error")  # TorchFT reports every quorum
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    shape = Shape(layers=arguments.layers)
    print(f"command: {shlex.join(['python', 'benchmarks/exchange.py', *argv])}")
    print(f"machine: {machine()}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, torchft {version('torchft')}")
    if arguments.cost:
        costs(arguments, shape)
    else:
        for wire in arguments.wire:
            compare(wire, arguments, shape)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
