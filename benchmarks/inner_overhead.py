"""What our trainer costs between exchanges: its tokens/s over plain TorchTitan's, on the same model, data and ranks.

    python benchmarks/inner_overhead.py                        # about 2.5 minutes, 1 rank, memory transport
    python benchmarks/inner_overhead.py --transport gloo --ranks 2

Paired, because a machine's speed drifts by more than the difference: both trainers are built once, each in processes of
its own, and take turns in blocks of a few steps, A B B A B A A B ...; the side whose turn it is not is stopped (SIGSTOP).
Each pair of neighbouring blocks gives one ratio of times. Reported: the median ratio, with a 95 % bootstrap interval.
On a busy machine that interval is wide; the time our trainer spends outside TorchTitan's own train_step is measured
directly, too. DiLoCo never exchanges here: H is larger than the run.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import shlex
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paired import interval, machine, order_of_turns, require_counts, verdict

REPO = Path(__file__).parents[1]
WARM_UP_STEPS = 10
TARGET = 0.98


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=str(REPO / "train_configs" / "quickstart.toml"), help="TOML file")
    parser.add_argument("--transport", choices=("memory", "gloo"), default="memory", help="of our trainer")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each trainer")
    parser.add_argument("--control", action="store_true", help="TorchTitan on both sides: what the noise is")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a process")
    parser.add_argument("--block-steps", type=int, default=2, help="inner steps of a turn")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to measure")
    parser.add_argument("--batch", type=int, default=1, help="rows per rank and step")
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "ranks", "threads", "block_steps", "batch")
    return arguments


# ---- one rank of one side, in a process of its own -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """What a process needs to be one rank of one of the two trainers."""

    ours: bool
    rank: int
    ranks: int
    port: int
    folder: str
    lighthouse: str
    arguments: argparse.Namespace


def build(rank: Rank) -> Any:
    """The trainer: ours, or TorchTitan's own with the same settings."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    from torchtitan_diloco import cpu
    from torchtitan_diloco.config.load import load_config
    from torchtitan_diloco.configure import trainer_config

    overrides = {
        "job.dump_folder": rank.folder,
        "training.steps": "1000000",
        "training.local_batch_size": str(rank.arguments.batch),
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "semi_sync.method": "diloco",
        "semi_sync.sync_every": "1000000",
        "semi_sync.num_islands": "1",
        "transport.kind": rank.arguments.transport,
        "lighthouse.address": rank.lighthouse,
    }
    resolved = load_config(rank.arguments.config, [w for k, v in overrides.items() for w in (f"--{k}", v)])
    config = trainer_config(resolved)
    if not rank.ours:
        written = config.written
        config = Trainer.Config(**{f.name: getattr(config, f.name) for f in fields(Trainer.Config)})
        config.metrics = same_fields(MetricsProcessor.Config, config.metrics)
        config.checkpoint = same_fields(CheckpointManager.Config, config.checkpoint)
        config.dump_folder = str(Path(rank.folder) / "torchtitan")
        cpu.adapt_config(config, written)
    trainer = config.build()
    cpu.adapt_model(trainer.model_parts)
    return trainer


def same_fields(target: Any, source: Any) -> Any:
    return target(**{f.name: getattr(source, f.name) for f in fields(target)})


def serve(rank: Rank, orders: Connection) -> None:
    """Build the trainer, then run as many steps as each order says and answer with the seconds they took."""
    from torchtitan_diloco.process import die_with_parent

    die_with_parent()  # a stopped process would otherwise outlive an interrupted benchmark
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(rank.rank),
        WORLD_SIZE=str(rank.ranks),
        LOCAL_WORLD_SIZE=str(rank.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(rank.port),
    )
    trainer = build(rank)
    inside = watch_upstream() if rank.ours else [0.0]
    batches = trainer.batch_generator(trainer.dataloader)
    while steps := orders.recv():
        inside[0] = 0.0
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(steps):  # the body of TorchTitan's own loop
            assert trainer.should_continue_training()
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)
            trainer.checkpointer.save(trainer.step, last_step=False)
        wall = time.perf_counter() - began
        orders.send((wall, time.process_time() - cpu_began, wall - inside[0]))
    trainer.close()
    orders.send(trainer.config.training.seq_len)


def watch_upstream() -> list[float]:
    """One number: the seconds spent in TorchTitan's own train_step, from now on."""
    from torchtitan.trainer import Trainer

    seconds, original = [0.0], Trainer.train_step

    def timed(trainer: Any, batches: Any) -> None:
        began = time.perf_counter()
        original(trainer, batches)
        seconds[0] += time.perf_counter() - began

    Trainer.train_step = timed  # type: ignore[method-assign]
    return seconds


class Side:
    """The processes of one trainer, stopped unless it is their turn."""

    def __init__(self, ours: bool, folder: str, lighthouse: str, arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.processes: list[BaseProcess] = []
        self.orders: list[Connection] = []
        for rank in range(arguments.ranks):
            here, there = context.Pipe()
            job = Rank(ours, rank, arguments.ranks, port, folder, lighthouse, arguments)
            process = context.Process(target=serve, args=(job, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.orders.append(here)

    def turn(self, steps: int) -> tuple[float, float, float]:
        """Run the steps; (wall seconds of the slowest rank, CPU seconds of all, most seconds outside upstream's step)."""
        self._signal(signal.SIGCONT)
        for order in self.orders:
            order.send(steps)
        answers = [order.recv() for order in self.orders]
        self._signal(signal.SIGSTOP)
        walls, used, outside = zip(*answers, strict=True)
        return max(walls), sum(used), max(outside)

    def end(self) -> int:
        """Tokens of a row."""
        self._signal(signal.SIGCONT)
        for order in self.orders:
            order.send(0)
        return max(int(order.recv()) for order in self.orders)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _signal(self, number: int) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def lighthouse(transport: str) -> Iterator[str]:
    """Address of a Lighthouse, if the transport needs one."""
    if transport != "gloo":
        yield ""
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


# ---- the measurement -------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: str, address: str) -> dict[str, Any]:
    sides: list[Side] = []
    try:
        for ours in (False, True):
            sides.append(Side(ours and not arguments.control, folder, address, arguments))
            sides[-1].turn(WARM_UP_STEPS)
        walls: tuple[list[float], list[float]] = ([], [])
        used: tuple[list[float], list[float]] = ([], [])
        outside: list[float] = []
        end = time.monotonic() + arguments.seconds
        for turns in order_of_turns(100_000):
            for side in turns:
                wall, cpu_s, extra = sides[side].turn(arguments.block_steps)
                walls[side].append(wall)
                used[side].append(cpu_s)
                if side:
                    outside.append(extra / arguments.block_steps)
            if time.monotonic() > end:
                break
        seq_len = max(side.end() for side in sides)
    finally:
        for side in sides:
            side.kill()
    tokens = arguments.block_steps * arguments.batch * seq_len * arguments.ranks
    return {"walls": walls, "used": used, "outside": outside, "tokens": tokens}


def report(arguments: argparse.Namespace, argv: Sequence[str], result: dict[str, Any]) -> None:
    import torch
    import torchtitan

    theirs, ours = result["walls"]
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    used = [a / b for a, b in zip(*result["used"], strict=True)]
    low, high = interval(ratios)
    used_low, used_high = interval(used)
    step_ms = 1000 * statistics.median(theirs) / arguments.block_steps
    print(f"command: {shlex.join(['python', 'benchmarks/inner_overhead.py', *argv])}")
    print(f"machine: {machine()}")
    print(
        f"torch {torch.__version__}, torchtitan {torchtitan.__version__}, Python {platform.python_version()}"
    )
    print(
        f"{len(ratios)} pairs of {arguments.block_steps} steps of {step_ms:.0f} ms, {arguments.ranks} rank(s)"
    )
    for name, walls in (
        ("TorchTitan", theirs),
        ("TorchTitan again" if arguments.control else f"DiLoCo, {arguments.transport}", ours),
    ):
        print(f"{name + ':':18} {result['tokens'] / statistics.median(walls):10.0f} tokens/s (median block)")
    print(f"ratio of tokens/s:     {statistics.median(ratios):.4f}  (95 % interval {low:.4f} to {high:.4f})")
    print(
        f"ratio of CPU seconds:  {statistics.median(used):.4f}  (95 % interval {used_low:.4f} to {used_high:.4f})"
    )
    if arguments.control:
        return
    outside_ms = 1000 * statistics.median(result["outside"])
    print(f"outside TorchTitan's train_step: {outside_ms:.3f} ms a step, {100 * outside_ms / step_ms:.2f} %")
    print(f"ratio >= {TARGET}: {verdict(low, high, TARGET)}")


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    arguments.config = str(Path(arguments.config).absolute())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(
            contextlib.chdir(folder)
        )  # relative paths begin here: it prepares a corpus of its own
        result = measure(arguments, folder, stack.enter_context(lighthouse(arguments.transport)))
    report(arguments, argv, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
