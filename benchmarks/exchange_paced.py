"""What exchanging slows training down: wall time of a whole window of paced inner steps, with exchange and without.

    python benchmarks/exchange_paced.py                                   # int8, no overlap: about 8 minutes, 10 GB
    python benchmarks/exchange_paced.py --fragments 4 --overlap 2

Two islands of one rank train a Llama 3 of 50 million parameters with our trainer, over the gloo transport on loopback; two
more train the same model alone (``semi_sync.method = "none"``). Each inner step is stretched to ``--pace`` seconds
(``debug.pace_step_seconds``), so that islands that share cores here do not take them from one another; what is left is
the time in which training stands still. The two pairs take turns, one window of H inner steps each, A B B A ...

Pacing hides what exchanging costs in CPU time: ``python benchmarks/exchange.py --cost`` says that.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from exchange_sides import ISLANDS, Shape
from inner_overhead import free_port, lighthouse
from paired import interval, machine, order_of_turns, require_counts

REPO = Path(__file__).parents[1]
HEAD = 32  # values of an attention head
TARGET = 0.05
LATE = 1.02  # of the paced time: beyond it, something else than the pace rules
BUSY = 0.6  # share of the cores above which paced islands disturb one another


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wire", default="int8", help="wire format")
    parser.add_argument("--window", type=int, default=20, help="inner steps of a window (H)")
    parser.add_argument("--pairs", type=int, default=4, help="windows of each side")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds of an inner step")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=0, help="inner steps")
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "window", "pairs", "fragments")
    if arguments.pace <= 0:
        parser.error("--pace must be more than 0")
    return arguments


@dataclass(frozen=True, slots=True)
class Job:
    """What a process needs to be one island of one side."""

    exchanges: bool
    island: int
    folder: str
    lighthouse: str
    port: int
    arguments: argparse.Namespace


def set_model(shape: Shape) -> None:
    """From now on TorchTitan's debug model is one of this shape."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    def flavor(attn_backend: str, tp_gemm_backend: Any = "default") -> Any:
        return llama3.Llama3Model.Config(
            dim=shape.dim,
            vocab_size=shape.vocabulary,
            tok_embeddings=Embedding.Config(
                num_embeddings=shape.vocabulary, embedding_dim=shape.dim, param_init=llama3._EMBEDDING_INIT
            ),
            norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=llama3._NORM_INIT),
            lm_head=Linear.Config(
                in_features=shape.dim,
                out_features=shape.vocabulary,
                param_init=llama3._output_linear_init(shape.dim),
            ),
            layers=llama3._build_llama3_layers(
                n_layers=shape.layers,
                dim=shape.dim,
                n_heads=shape.dim // HEAD,
                hidden_dim=shape.hidden,
                rope=ComplexRoPE.Config(dim=HEAD, max_seq_len=4096, theta=500000, scaling="llama"),
                attn_backend=attn_backend,
                tp_gemm_backend=tp_gemm_backend,
            ),
        )

    llama3.llama3_configs["debugmodel"] = flavor  # our settings know TorchTitan's own names only


def build(job: Job) -> Any:
    from torchtitan_diloco import cpu
    from torchtitan_diloco.config.load import load_config
    from torchtitan_diloco.configure import trainer_config

    set_model(Shape())
    given = job.arguments
    overrides = {
        "job.dump_folder": job.folder,
        "job.name": "exchanging" if job.exchanges else "alone",
        "training.steps": "1000000",
        "training.local_batch_size": "1",
        "training.seq_len": "64",
        "data.sources": json.dumps([{"path": f"{job.folder}/corpus", "prepare_from": "bundled:kjv"}]),
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "debug.pace_step_seconds": str(given.pace),
        "island.id": str(job.island),
        "lighthouse.address": job.lighthouse,
        "semi_sync.method": "diloco" if job.exchanges else "none",
        "semi_sync.num_islands": str(ISLANDS if job.exchanges else 1),
        "semi_sync.sync_every": str(given.window),
        "semi_sync.fragments": str(given.fragments),
        "semi_sync.overlap": str(given.overlap),
        "semi_sync.codec.wire": given.wire,
    }
    words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
    config = trainer_config(load_config(str(REPO / "train_configs" / "quickstart.toml"), words))
    trainer = config.build()
    cpu.adapt_model(trainer.model_parts)
    return trainer


def serve(job: Job, orders: Connection) -> None:
    """Build the trainer, then run as many inner steps as each order says; answers (wall seconds, CPU seconds)."""
    from torchtitan_diloco.process import die_with_parent

    die_with_parent()
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )  # fmt: skip
    trainer = build(job)
    batches = trainer.batch_generator(trainer.dataloader)
    orders.send(sum(p.numel() for part in trainer.model_parts for p in part.parameters()))
    while steps := orders.recv():
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(steps):  # the body of TorchTitan's own loop
            assert trainer.should_continue_training()
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)
        orders.send((time.perf_counter() - began, time.process_time() - cpu_began))
    if job.exchanges:
        versions = [state.version for state in trainer.method.outer.states]
        orders.send(sum(versions))
    else:
        orders.send(0)


class Side:
    """Two islands, with exchange between them or without. They wait between their turns."""

    def __init__(self, exchanges: bool, folder: str, address: str, arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[BaseProcess] = []
        self._orders: list[Connection] = []
        for island in range(ISLANDS):
            here, there = context.Pipe()
            job = Job(exchanges, island, folder, address, free_port(), arguments)
            process = context.Process(target=serve, args=(job, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._orders.append(here)
        self.parameters: int = self.ask(None)[0]

    def ask(self, steps: int | None) -> list[Any]:
        for orders in self._orders:
            if steps is not None:
                orders.send(steps)
        return [orders.recv() for orders in self._orders]

    def turn(self, steps: int) -> tuple[float, float]:
        """(wall seconds of the slower island, CPU seconds of both)."""
        walls, cpus = zip(*self.ask(steps), strict=True)
        return max(walls), sum(cpus)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def report(
    walls: tuple[list[float], list[float]], cpus: tuple[list[float], list[float]], paced_s: float
) -> None:
    """Print what exchanging slows a window down. paced_s: what one should take."""
    alone, exchanging = walls
    slower = [b / a - 1 for a, b in zip(alone, exchanging, strict=True)]
    low, high = interval(slower)
    for name, wall, cpu in zip(("alone", "exchanging"), walls, cpus, strict=True):
        busy = sum(cpu) / sum(wall) / len(os.sched_getaffinity(0))
        print(
            f"{name + ':':11} {statistics.median(wall):.2f} s a window, {100 * busy:.0f} % of the cores busy"
        )
        if busy > BUSY:
            print(f"    above {100 * BUSY:.0f} %: void, choose a larger --pace")
    if statistics.median(alone) > LATE * paced_s:
        print(f"    windows should take {paced_s:.2f} s: void, other programs hold the steps up")
    verdict = "met" if high <= TARGET else "MISSED" if low > TARGET else "not resolved"
    print(f"slow-down: {100 * statistics.median(slower):.2f} %  ({100 * low:.2f} to {100 * high:.2f})")
    print(f"slow-down <= {100 * TARGET:.0f} %: {verdict}")


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RUST_LOG", "error")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    walls: tuple[list[float], list[float]] = ([], [])
    cpus: tuple[list[float], list[float]] = ([], [])
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        address = stack.enter_context(lighthouse("gloo"))
        sides = []
        for exchanges in (False, True):
            sides.append(Side(exchanges, folder, address, arguments))
            stack.callback(sides[-1].kill)
        for side in sides:
            side.turn(arguments.window)  # momentum and buffers are there
        for turns in order_of_turns(arguments.pairs):
            for number in turns:
                wall, cpu = sides[number].turn(arguments.window)
                walls[number].append(wall)
                cpus[number].append(cpu)
        committed = max(sides[1].ask(0))
    slots = (arguments.pairs + 1) * arguments.fragments
    print(f"command: {shlex.join(['python', 'benchmarks/exchange_paced.py', *argv])}")
    print(f"machine: {machine()}, Python {platform.python_version()}")
    print(
        f"{sides[1].parameters / 1e6:.1f}M parameters, {arguments.wire}, {arguments.fragments} fragment(s), overlap "
        f"{arguments.overlap}; {arguments.pairs} windows of {arguments.window} steps of {arguments.pace} s; "
        f"{committed} of {slots} slots committed"
    )
    report(walls, cpus, arguments.window * arguments.pace)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
