"""Runs that several integration tests look at; each is done once per session."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from torchtitan_diloco.data.prepare import prepare

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def nobody_asks_the_lighthouse_any_more() -> Iterator[None]:
    """A thread that is inside torchft when the interpreter ends aborts the whole process, whatever the tests said."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("lighthouse-"):
            thread.join(timeout=15)  # a request that waits for its quorum ends after 10 s
            assert not thread.is_alive(), f"some test left {thread.name} running"


@dataclass(frozen=True)
class FinishedRun:
    """A run that `torchtitan-diloco run` did. folder: its run folder. output: what the command printed."""

    folder: Path
    output: str
    seconds: float
    islands: Sequence[int] = field(default=(0, 1))

    def island(self, number: int) -> Path:
        return self.folder / f"island-{number}"


@pytest.fixture(scope="session")
def unequal_islands_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The shipped quickstart on two islands, of 2 ranks and of 1, for two slots of 7 steps, with its sends dumped.

    A fresh folder: the bundled text is prepared there, as on first use. Do not change anything in it.
    """
    folder = tmp_path_factory.mktemp("unequal-islands")
    command = [
        *(sys.executable, "-m", "torchtitan_diloco", "run", str(REPO / "train_configs" / "quickstart.toml")),
        *("--islands", "2", "--ranks", "2,1", "--job.dump_folder", "outputs", "--job.name", "unequal"),
        *(
            "--training.steps",
            "14",
            "--semi_sync.sync_every",
            "7",
            "--debug.dump_sends",
            "--metrics.log_freq",
            "1",
        ),
        *("--training.local_batch_size", "2", "--training.seq_len", "64"),
    ]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return FinishedRun(folder / "outputs" / "unequal", done.stdout, time.monotonic() - began)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled text in sequences of 64, for runs that are not about preparing it."""
    folder = tmp_path_factory.mktemp("corpus") / "kjv-64"
    prepare(["bundled:kjv"], "bundled:bpe2048", 64, folder)
    return folder
