"""What the wire codecs cost on one core: seconds to encode and decode, bytes, and the error they make.

    python benchmarks/codecs.py                        # 50 million values, best of 7; about 2 minutes, 1.2 GB
    python benchmarks/codecs.py --values 5000000 --repeats 3

Every buffer is allocated beforehand. "pass" is one copy of the values (float32 to float32), "cast" a conversion to bfloat16
and back by torch alone. Times are wall time, best of the repeats, which take turns over the codecs so that a busy spell of
the machine does not hit one of them alone; CPU time of the best repeat is beside it,
since other processes may share the core.
The error is that of one encoding, root mean square of (decoded - value) over root mean square of the values, for Gaussian
values and for heavy-tailed ones (Gaussian times log-normal with sigma 1.5). Exit code 1 when a target is missed.
"""

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from paired import require_counts

from torchtitan_diloco.outer.codec import Plan, make_codec, noise_seed

TARGET_S = {"int8": 0.15, "fp4_e3m0": 0.35, "topk": 1.0}
"""Encode + decode of TARGET_VALUES values, nearest rounding."""

TARGET_SHARE = {"int8": 0.27, "fp4_e3m0": 0.14}
TARGET_VALUES = 50_000_000
STEPS = ("encode", "decode", "decode_add")


@dataclass(slots=True)
class Best:
    wall_s: float = float("inf")
    cpu_s: float = float("inf")

    def time(self, work: Callable[[], object]) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        if wall < self.wall_s:
            self.wall_s, self.cpu_s = wall, cpu


@dataclass(slots=True)
class Row:
    name: str
    plan: Plan
    stochastic: bool
    seconds: dict[str, Best] = field(default_factory=lambda: {step: Best() for step in STEPS})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--values", type=int, default=TARGET_VALUES, help="values of the tensor")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many counts")
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "values", "repeats")
    return arguments


def rows(values: int) -> list[Row]:
    roundings: tuple[Literal["nearest", "stochastic"], ...] = ("nearest", "stochastic")
    made = []
    for wire in ("fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk"):
        for rounding in roundings if wire != "fp32" else roundings[:1]:
            name = wire if rounding == "nearest" else f"{wire}, stochastic"
            made.append(
                Row(name, make_codec(wire, rounding=rounding).prepare(values), rounding == "stochastic")
            )
    return made


def gaussian(out: torch.Tensor) -> None:
    torch.randn(len(out), generator=torch.Generator().manual_seed(0), out=out)
    out.mul_(1e-3)


def heavy_tailed(out: torch.Tensor) -> None:
    gaussian(out)
    size = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)).mul_(1.5).exp_()
    for start in range(0, len(out), len(size)):  # a prime period, so that no block repeats
        part = out[start : start + len(size)]
        part.mul_(size[: len(part)])


def error(plan: Plan, values: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor) -> float:
    plan.encode(values, buffer, noise_seed("benchmark", 0, 0, 0), error=out)
    return float(out.norm() / values.norm())


def report(arguments: argparse.Namespace, argv: Sequence[str]) -> bool:
    """Measure and print; whether all targets that apply were met."""
    numel = arguments.values
    values, out = torch.empty(2, numel)
    half, bytes_ = torch.empty(numel, dtype=torch.bfloat16), torch.empty(4 * numel, dtype=torch.uint8)
    table = rows(numel)
    copy, cast = Best(), Best()
    gaussian(values)
    for _ in range(arguments.repeats):
        copy.time(lambda: out.copy_(values))
        cast.time(lambda: (half.copy_(values), out.copy_(half)))
        for row in table:
            buffer = bytes_[: row.plan.nbytes]
            row.seconds["encode"].time(partial(row.plan.encode, values, buffer, 1))
            row.seconds["decode"].time(partial(row.plan.decode, buffer, out))
            row.seconds["decode_add"].time(partial(row.plan.decode_add, buffer, 0.5, out))

    errors: list[list[float]] = []
    for make in (gaussian, heavy_tailed):
        make(values)
        errors.append([error(row.plan, values, bytes_[: row.plan.nbytes], out) for row in table])

    names = [w for w in Path("/proc/cpuinfo").read_text().splitlines() if w.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else "CPU"
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"command: {shlex.join(['python', 'benchmarks/codecs.py', *argv])}")
    print(f"machine: {platform.machine()} {model}, {os.cpu_count()} cores, one used; load average {load}")
    print(
        f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), Python {platform.python_version()}"
    )
    print(f"{numel} values, best of {arguments.repeats}; pass {copy.wall_s:.3f} s, cast {cast.wall_s:.3f} s")
    print(
        f"{'codec':21} {'encode':>7} {'decode':>7} {'add':>7} {'enc+dec s (CPU)':>16} {'/ pass':>7} {'/ cast':>7}"
        f" {'bytes':>7} {'error: Gaussian':>16} {'heavy':>8}"
    )
    met = True
    for row, plain, heavy in zip(table, *errors, strict=True):
        encode, decode, add = (row.seconds[step] for step in STEPS)
        both, cpu = encode.wall_s + decode.wall_s, encode.cpu_s + decode.cpu_s
        share = row.plan.nbytes / (4 * numel)
        print(
            f"{row.name:21} {encode.wall_s:7.3f} {decode.wall_s:7.3f} {add.wall_s:7.3f} {both:8.3f} ({cpu:.3f})"
            f" {both / copy.wall_s:7.1f} {both / cast.wall_s:7.1f} {share:7.4f} {plain:16.4f} {heavy:8.4f}"
        )
        limit = TARGET_S.get(row.name)
        if limit is not None and numel == TARGET_VALUES:
            print(f"    target {limit} s: {'met' if both <= limit else 'MISSED'}")
            met = met and both <= limit
        met = met and share <= TARGET_SHARE.get(row.name, 1.0)
    return met


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    arguments = parse(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return 0 if report(arguments, argv) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
