"""A hub as users start it, in a process of its own that can be killed and started again on the same port and folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.hub_islands import RUN

REPO = Path(__file__).parents[2]


class HubProcess:
    """settings: of [syncer]. more: words of the command."""

    def __init__(self, folder: Path, *more: str, **settings: Any) -> None:
        self._folder, self.port, self._more = folder, 0, more
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / "hub.log"
        lines = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
        (folder / "run.toml").write_text(
            f'[job]\nname = "{RUN}"\ndump_folder = "{folder}"\n[syncer]\n{lines}'
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, seconds: float = 60.0) -> None:
        """It listens when this returns."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        command = [
            *(
                sys.executable,
                "-m",
                "torchtitan_diloco",
                "syncer",
                str(self._folder / "run.toml"),
                *self._more,
            ),
            *("--syncer.bind", f"127.0.0.1:{self.port}", "--port-file", str(port_file)),
        ]
        with open(self.log, "ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log
            )
        end = time.monotonic() + seconds
        while not port_file.exists():
            assert self._process.poll() is None and time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    def workers(self) -> list[psutil.Process]:
        """The processes that the hub has started."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children()

    def ended(self, seconds: float = 30.0) -> int:
        """The exit code, once it has ended by itself."""
        assert self._process is not None
        code = self._process.wait(seconds)
        self._process = None
        return code

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self, seconds: float = 30.0, number: int = signal.SIGTERM) -> int:
        """Ask it to end in good order; its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(seconds)
        self._process = None
        return code
