"""Islands of one rank that are told to stop at a random moment, and then go on: forks of one process, started in seconds.

Run as ``python -m tests.helpers.signalled COUNT SEED FOLDER``; prints a JSON object for every island.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers import islands, tiny
from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
from torchtitan_diloco.observe.reading import EventTail, last_checkpoint, read_state

STEPS, MORE, LONG_S = 100_000, 2, 60.0


@dataclass(frozen=True)
class Stopped:
    """after_s: from the first inner step to the signal. twice: a second one came 10 ms later. codes: of the process and of
    the one that went on; steps: those it made. saved: step of the checkpoint that the first left."""

    after_s: float
    twice: bool
    codes: tuple[int | None, int | None]
    state: str
    drained_at: int
    saved: int | None
    steps: list[int]


def train(folder: Path, steps: int) -> None:
    config = islands.config_of(
        "diloco",
        folder,
        sync_every=3,
        steps=steps,
        layers=1,
        vocab=64,
        checkpoint=IslandCheckpointManager.Config(enable=True, interval=STEPS),
    )
    with (folder / "log").open("a") as log, tiny.single_rank():
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        trainer = tiny.build_trainer(config)
        trainer.train()
        trainer.close()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in EventTail(folder / "events.jsonl").read() if e["event"] == kind]


def ended(process: BaseProcess) -> int | None:
    process.join(LONG_S)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def one(folder: Path, seed: int) -> Stopped:
    rng = random.Random(seed)
    after_s, twice = rng.uniform(0.0, 0.6), rng.random() < 0.5
    folder.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=train, args=(folder, STEPS))
    process.start()
    assert process.pid is not None
    end = time.monotonic() + LONG_S
    while not events(folder, "inner") and process.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(after_s)
    for _ in range(1 + twice):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)
    first = ended(process)
    state = read_state(folder)
    drains = events(folder, "drain")
    saved, before = last_checkpoint(folder / "checkpoint"), len(events(folder, "inner"))
    second = fork.Process(target=train, args=(folder, (saved or 0) + MORE))
    second.start()
    code = ended(second)
    steps = [e["step"] for e in events(folder, "inner")[before:]]
    return Stopped(
        after_s,
        twice,
        (first, code),
        state.state if state else "",
        drains[-1]["step"] if drains else -1,
        saved,
        steps,
    )


def some(indices: range, seed: int, folder: Path) -> None:
    for i in indices:
        (folder / f"{i}.json").write_text(json.dumps(asdict(one(folder / str(i), seed + i))))


def main() -> None:
    count, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True)
    # Not threads: a fork of a process that has several ends badly.
    fork = multiprocessing.get_context("fork")
    halves = [fork.Process(target=some, args=(range(i, count, 2), seed, folder)) for i in (0, 1)]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    for i in range(count):
        print((folder / f"{i}.json").read_text(), flush=True)


if __name__ == "__main__":
    main()
