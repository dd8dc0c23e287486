"""The real launcher over a fake trainer, in a process of its own, for tests that start, watch, stop and kill it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
CONFIG = """
[job]
dump_folder = "{folder}"
name = "trial"
[model]
flavor = "debugmodel"
hf_assets_path = "bundled:bpe2048"
[training]
steps = 10
[semi_sync]
method = "none"
"""


class Run:
    """One `torchtitan-diloco run` over the fake trainer."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        tables: str = "num_islands = 2",
        **script: Any,
    ) -> None:
        self.folder = folder / "trial"
        config = folder / "trial.toml"
        config.write_text(CONFIG.format(folder=folder) + tables)
        script = {"steps": 10, "step_s": 0.005} | script
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "drive.py"), str(config), *arguments],
            env={**os.environ, **(environment or {}), "FAKE_TRAINER": json.dumps(script)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def end(self) -> int:
        """Wait for its end; the exit code. Its words are in `output` then."""
        self.output += self.process.communicate(timeout=20)[0]
        return self.process.returncode

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def matching(self, words: str) -> list[psutil.Process]:
        """Living processes of the tree with `words` in their command line."""
        found = []
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):  # zombies included
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def events(self, island: int) -> list[dict[str, Any]]:
        path = self.folder / f"island-{island}" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def state(self, island: int) -> dict[str, Any]:
        return json.loads((self.folder / f"island-{island}" / "state.json").read_text())

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    def wait_for_step(self, step: int, islands: tuple[int, ...] = (0, 1)) -> None:
        eventually(lambda: all(any(e["step"] >= step for e in self.events(i)) for i in islands))


def eventually(holds: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until `holds` is true; fail after `within_s`."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"did not come true within {within_s} s"
        time.sleep(0.02)
