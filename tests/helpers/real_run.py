"""Real runs for integration tests: `torchtitan-diloco run`, or single islands under torchrun, started, watched, killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from torchtitan_diloco.observe.reading import EventTail

REPO = Path(__file__).parents[2]
QUICKSTART = REPO / "train_configs" / "quickstart.toml"
CLOSED = "http://127.0.0.1:9"
"""Nothing listens there: whoever tries to reach the network through this proxy fails at once."""

CONFIG = """
[job]
dump_folder = "outputs"
name = "trial"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "bundled:bpe2048"
[[data.sources]]
path = "{corpus}"
[training]
local_batch_size = 1
seq_len = 64
steps = 20
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 5
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 10
[debug]
seed = 42
[lighthouse]
heartbeat_timeout_s = 3.0
[semi_sync]
method = "diloco"
num_islands = 2
sync_every = 5
"""


def offline() -> dict[str, str]:
    """The environment of a machine without network."""
    proxies = {f"{kind}_proxy": CLOSED for kind in ("http", "https", "all")}
    environment = {k: v for k, v in os.environ.items() if k.lower() not in (*proxies, "no_proxy")}
    offline_flags = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {**environment, **proxies, **offline_flags, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def write_config(folder: Path, corpus: Path, name: str = "trial.toml") -> Path:
    path = folder / name
    path.write_text(CONFIG.format(corpus=corpus))
    return path


def traces_of_ours(text: str) -> list[str]:
    """Lines of stack traces that run through this package, in what was logged or printed."""
    return re.findall(r'File ".*/torchtitan_diloco/.*\.py".*', text)


class RunFolder:
    """What a run writes, read while it is live."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def island(self, number: int) -> Path:
        return self.path / f"island-{number}"

    def events(self, island: int, kind: str | None = None) -> list[dict[str, Any]]:
        events = EventTail(self.island(island) / "events.jsonl").read()
        return [event for event in events if kind in (None, event["event"])]

    def incarnations(self, island: int) -> list[list[dict[str, Any]]]:
        """Events of each start of the island, in order."""
        found: dict[str, list[dict[str, Any]]] = {}
        for event in self.events(island):
            found.setdefault(event["incarnation"], []).append(event)
        return list(found.values())

    def state(self, island: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.island(island) / "state.json").read_text())
        return state

    def step(self, island: int) -> int:
        return max((event["step"] for event in self.events(island, "inner")), default=0)

    def digests(self, island: int, since: float = 0.0, until: float = float("inf")) -> dict[int, str]:
        """Committed slot -> anchor digest; fails where the island holds two for one slot. Times: epoch seconds."""
        found: dict[int, str] = {}
        for event in self.events(island, "round"):
            if event["committed"] and since <= event["t"] <= until:
                assert found.setdefault(event["round"], event["digest"]) == event["digest"], event
        return found

    def common_digests(self, since: float = 0.0, until: float = float("inf")) -> dict[int, str]:
        """Of all slots that both islands committed; fails where they differ."""
        first, second = (self.digests(island, since, until) for island in (0, 1))
        common = sorted(first.keys() & second.keys())
        assert [first[slot] for slot in common] == [second[slot] for slot in common]
        return {slot: first[slot] for slot in common}

    def log_files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.suffix == ".log"]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.log_files())

    def processes(self) -> list[psutil.Process]:
        """Living processes of this run. Its paths are relative: the working directory tells it from other runs."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._belongs(p)]

    def trainers(self, island: int) -> list[psutil.Process]:
        """Ranks of the island, without their torchrun."""
        return [p for p in self._of_island(island) if "torch.distributed.run" not in p.cmdline()]

    def torchrun(self, island: int) -> psutil.Process:
        (found,) = [p for p in self._of_island(island) if "torch.distributed.run" in p.cmdline()]
        return found

    def _of_island(self, island: int) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--island.id" in words and words[words.index("--island.id") + 1] == str(island):
                    found.append(process)
        return found

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == self.path.parents[1]
        except (psutil.Error, OSError):
            return False


class LocalRun(RunFolder):
    """One `torchtitan-diloco run FILE` (or another command's) in a working directory of its own."""

    def __init__(
        self, cwd: Path, config: Path, *arguments: str, name: str = "trial", command: str = "run"
    ) -> None:
        super().__init__(cwd / "outputs" / name)
        self.began = time.monotonic()
        with (cwd / "stdout").open("a") as out, (cwd / "stderr").open("a") as err:
            self._out, self._err = Path(out.name), Path(err.name)
            self._from = (out.tell(), err.tell())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan_diloco", command, str(config), *arguments],
                cwd=cwd,
                env=offline(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._out.read_bytes()[self._from[0] :].decode()

    @property
    def errors(self) -> str:
        return self._err.read_bytes()[self._from[1] :].decode()

    def says_done(self, island: int, steps: int, tokens: int, slot: int, digest: str) -> bool:
        """Whether the closing table has this row: done, never restarted, all slots up to ``slot`` committed."""
        row = (
            rf"^ +{island} done +{steps} +{tokens:,} +\d\.\d+ +\d\.\d+ +{slot + 1} +\d+\.\d% +0 "
            rf"{digest[:10]} @ {slot}"
        )
        return re.search(row, self.output, re.MULTILINE) is not None

    def end(self, within_s: float = 240) -> int:
        code = self.process.wait(within_s)
        self.seconds = time.monotonic() - self.began
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def until(self, holds: Callable[[], object], within_s: float = 90) -> None:
        """Wait until `holds` is true; fail when the command ends before, or time is up."""
        deadline = time.monotonic() + within_s
        while not holds():
            said = f"{self.output[-4000:]}\n{self.errors[-4000:]}"
            assert self.process.poll() is None, f"`run` ended with {self.process.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"did not come true within {within_s} s:\n{said}"
            time.sleep(0.1)

    def until_step(self, step: int, islands: Sequence[int] = (0, 1), within_s: float = 90) -> None:
        self.until(lambda: all(self.step(i) >= step for i in islands), within_s)

    def stop(self) -> None:
        """The end of a test, however it went: nothing is left running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def local_run(
    cwd: Path, config: Path, *arguments: str, name: str = "trial", command: str = "run"
) -> Iterator[LocalRun]:
    run = LocalRun(cwd, config, *arguments, name=name, command=command)
    try:
        yield run
    finally:
        run.stop()


class HandStarted(RunFolder):
    """One island as on a cluster: torchrun by hand, no launcher around it."""

    def __init__(self, cwd: Path, config: Path, *arguments: str, ranks: int = 1, name: str = "trial") -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        super().__init__(cwd / "outputs" / name)
        self._output = cwd / f"torchrun-{'-'.join(a for a in arguments if a.isdigit()) or 'x'}.out"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)),
                    *(
                        "--rdzv-backend",
                        "c10d",
                        "--rdzv-endpoint",
                        "127.0.0.1:0",
                        "--local-addr",
                        "127.0.0.1",
                    ),
                    *("-m", "torchtitan_diloco.train", "--job.config_file", str(config), "--job.name", name),
                    *arguments,
                ],
                cwd=cwd,
                env=offline(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self, within_s: float = 120) -> int:
        return self.process.wait(within_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
