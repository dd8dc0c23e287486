"""A Lighthouse as users start it, in a process of its own that can be killed and started again on the same address."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.gateway_process import REPO, until

HEARTBEAT_S = 1.5
"""Silence after which it counts an island as gone."""


class LighthouseProcess:
    """prefix: words before the command, for instance to enter a network namespace."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self._folder, self._host, self._prefix, self.port = folder, host, list(prefix), 0
        self.log = folder / "lighthouse.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LighthouseProcess":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self.port}"

    def settings(self, patience_s: float = 60.0) -> dict[str, Any]:
        """Of [lighthouse]."""
        return {
            "address": self.address,
            "heartbeat_interval_s": 0.2,
            "heartbeat_timeout_s": HEARTBEAT_S,
            "quorum_interval_s": 0.1,
            "patience_s": patience_s,
        }

    def start(self) -> None:
        """It listens when this returns."""
        port_file = self._folder / "lighthouse-port"
        port_file.unlink(missing_ok=True)
        command = [
            *self._prefix, sys.executable, "-m", "torchtitan_diloco", "lighthouse", "--bind", f"{self._host}:{self.port}",
            "--port-file", str(port_file), "--join-timeout-ms", "500", "--quorum-tick-ms", "50",
            "--heartbeat-timeout-ms", str(int(1000 * HEARTBEAT_S)),
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self._process = process = subprocess.Popen(
                command, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=log, stderr=log
            )
        until("a Lighthouse", lambda: port_file.exists() or process.poll() is not None, 30)
        assert process.poll() is None, self.log.read_text()
        self.port = int(port_file.read_text())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
