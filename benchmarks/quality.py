"""What wire codecs do to the loss: the quickstart on two islands, every codec with the same seeds and the same batches.

    python benchmarks/quality.py                              # about 15 minutes on two quiet cores
    python benchmarks/quality.py --arms fp32 int4 --seeds 1

Real runs (`torchtitan-diloco run`), one after the other. The figure of a run is the mean loss of both islands over its last
20 steps; since an arm trains on the very batches that fp32 trained on with that seed, their ratio has little noise.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paired import machine, require_counts

from torchtitan_diloco.observe.reading import EventTail

REPO = Path(__file__).parents[1]
LAST = 20  # steps that count

ARMS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--semi_sync.codec.wire", "bf16"],
    "int8": ["--semi_sync.codec.wire", "int8"],
    "int4": ["--semi_sync.codec.wire", "int4"],
    "fp4_e3m0": ["--semi_sync.codec.wire", "fp4_e3m0"],
    "int4, feedback": ["--semi_sync.codec.wire", "int4", "--semi_sync.codec.error_feedback"],
    "fp4_e3m0, feedback": ["--semi_sync.codec.wire", "fp4_e3m0", "--semi_sync.codec.error_feedback"],
    "topk 4 %": ["--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.04"],
    "topk 4 %, feedback": [
        *("--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.04"),
        "--semi_sync.codec.error_feedback",
    ],
    "topk 1 %": ["--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.01"],
    "topk 1 %, feedback": [
        *("--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.01"),
        "--semi_sync.codec.error_feedback",
    ],
    "topk 0.1 %": ["--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.001"],
    "topk 0.1 %, feedback": [
        *("--semi_sync.codec.wire", "topk", "--semi_sync.codec.density", "0.001"),
        "--semi_sync.codec.error_feedback",
    ],
}

OFTEN = [  # an exchange every second step, without outer momentum: what top-k's feedback is made for
    *("--semi_sync.sync_every", "2", "--semi_sync.outer.lr", "1.0", "--semi_sync.outer.momentum", "0"),
    "--semi_sync.outer.nesterov=false",
]
ARMS |= {
    f"often: {name}": [*OFTEN, *ARMS[name]]
    for name in ("fp32", "topk 4 %", "topk 4 %, feedback", "topk 1 %", "topk 1 %, feedback")
}


def base_of(arm: str) -> str:
    """The arm that this one is compared with."""
    return "often: fp32" if arm.startswith("often: ") else "fp32"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="their fp32 is added")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=120, help="inner steps of each island")
    parser.add_argument("--batch", type=int, default=4, help="rows of 128 tokens per island and step")
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "seeds", "steps", "batch")
    return arguments


def train(folder: Path, arm: str, seed: int, arguments: argparse.Namespace) -> float:
    """The loss that an arm ends with."""
    name = f"{list(ARMS).index(arm)}-{seed}"
    command = [
        *(sys.executable, "-m", "torchtitan_diloco", "run", str(REPO / "train_configs" / "quickstart.toml")),
        *("--islands", "2", "--ranks", "1", "--job.name", name, "--debug.seed", str(seed)),
        *("--training.steps", str(arguments.steps), "--training.local_batch_size", str(arguments.batch)),
        *("--metrics.log_freq", "1", "--checkpoint.enable=false", *ARMS[arm]),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    losses = [
        event["loss"]
        for island in (0, 1)
        for event in EventTail(folder / "outputs" / name / f"island-{island}" / "events.jsonl").read()
        if event["event"] == "inner" and event["step"] > arguments.steps - LAST
    ]
    return final_loss(losses, islands=2, steps=min(LAST, arguments.steps))


def final_loss(losses: Sequence[float], islands: int, steps: int) -> float:
    """The mean. Raises ValueError unless there is one loss for every island and step."""
    if len(losses) != islands * steps:
        raise ValueError(f"{len(losses)} losses of {islands} islands in {steps} steps")
    return statistics.fmean(losses)


def table(results: dict[str, list[float]]) -> str:
    """A Markdown table: each arm's losses by seed, and how far its mean ratio to fp32 is from 1 (often's to often's fp32)."""
    seeds = len(next(iter(results.values())))
    lines = [
        "| Codec | "
        + " | ".join(f"seed {s}" for s in range(1, seeds + 1))
        + " | against fp32, mean (worst) |",
        "|---" * (seeds + 2) + "|",
    ]
    for arm, losses in results.items():
        change = [100 * (loss / base - 1) for loss, base in zip(losses, results[base_of(arm)], strict=True)]
        worst = max(change, key=abs)
        cells = [f"{loss:.4f}" for loss in losses]
        lines.append(f"| {arm} | {' | '.join(cells)} | {statistics.fmean(change):+.2f} % ({worst:+.2f} %) |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    print(f"command: {shlex.join(['python', 'benchmarks/quality.py', *argv])}")
    print(f"machine: {machine()}")
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in dict.fromkeys([*map(base_of, arguments.arms), *arguments.arms]):
            began = time.monotonic()
            results[arm] = [
                train(Path(folder), arm, seed, arguments) for seed in range(1, arguments.seeds + 1)
            ]
            print(f"{arm}: {results[arm]} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
