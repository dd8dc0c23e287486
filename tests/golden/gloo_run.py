"""Runs islands as real processes over the gloo transport, with a TorchFT Lighthouse for each run in this process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from torchft.coordination import LighthouseServer

from tests.golden.island import Case, Plan

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class GlooRun:
    """A run below the folder of its name; ``islands`` lists the processes of each island, rank by rank."""

    name: str
    case: Case
    plans: Sequence[Plan]
    islands: Sequence[Sequence[int]]


def run_gloo(
    folder: Path,
    runs: Sequence[GlooRun],
    *,
    timeout_s: float,
    environments: Mapping[int, Mapping[str, str]] | None = None,
    worker: str = "tests.golden.gloo_worker",
) -> None:
    """Do all runs, one after the other, in one set of processes. environments: by process, on top of ours.

    worker: the module that each process runs.

    Raises AssertionError, with the output of a process, when one fails or the time is up.
    """
    processes = sorted({process for run in runs for island in run.islands for process in island})
    with ExitStack() as cleanup:
        described = []
        for run in runs:
            server = LighthouseServer(
                bind="127.0.0.1:0",
                min_replicas=1,
                join_timeout_ms=1000,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=5000,
            )
            cleanup.callback(server.shutdown)
            port = server.address().rpartition(":")[2].rstrip("/")
            described.append({**asdict(run), "lighthouse": f"http://127.0.0.1:{port}"})
        file = folder / "runs.json"
        file.write_text(json.dumps(described))
        children = {}
        for process in processes:
            log = cleanup.enter_context(open(folder / f"process-{process}.log", "wb"))
            children[process] = subprocess.Popen(
                [sys.executable, "-m", worker, str(file), str(process)],
                cwd=REPO,
                env={**os.environ, **(environments or {}).get(process, {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            cleanup.callback(end, children[process])
        deadline = time.monotonic() + timeout_s
        while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
            if any(child.poll() for child in children.values()):
                break  # the others would wait for it
            time.sleep(0.1)
        for process, child in sorted(children.items(), key=lambda item: item[1].poll() is None):
            if child.poll() != 0:
                output = (folder / f"process-{process}.log").read_text(errors="replace")[-4000:]
                how = "is not done in time" if child.poll() is None else f"ended with {child.poll()}"
                raise AssertionError(f"process {process} {how}:\n{output}")


def end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
