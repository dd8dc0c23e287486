"""What the islands of a local run meet at: a Lighthouse or a hub of our own, as a child on a free port."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan_diloco.cli.local.folder import CONFIG
from torchtitan_diloco.cli.local.processes import Child
from torchtitan_diloco.config.reach import host_and_port, why_unreachable
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.process import LAUNCHER_PID

START_WAIT_S = 60.0
STOP_WAIT_S = 20.0
REACH_WAIT_S = 3.0
RESTART_DELAY_S = 1.0
_MARK = "TORCHTITAN_DILOCO_SERVER"


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of server. command: its sub-command and options, but for address and port file. bind: the option for them.

    setting: the key that gives islands its address. saves: whether it has a state to save when it ends.
    """

    name: str
    command: Sequence[str]
    bind: str
    setting: str
    saves: bool = False


def lighthouse(*, join_timeout_s: float, heartbeat_timeout_s: float) -> Kind:
    command = [
        *("lighthouse", "--min-replicas", "1"),
        *("--join-timeout-ms", str(round(join_timeout_s * 1000))),
        *("--heartbeat-timeout-ms", str(round(heartbeat_timeout_s * 1000))),
    ]
    return Kind("Lighthouse", command, "--bind", "lighthouse.address")


def hub(folder: Path) -> Kind:
    """folder: of the run, which holds its configuration."""
    # On loopback, under an address that is in no certificate, and among processes of one user.
    open_to_all = [
        word for key in ("cert", "key", "tokens", "worker_urls") for word in (f"--syncer.{key}", "")
    ]
    return Kind(
        "hub", ["syncer", str(folder / CONFIG), *open_to_all], "--syncer.bind", "transport.urls", True
    )


class LocalServer:
    """Our own, a child process; started again on the same port should it die."""

    def __init__(
        self, folder: Path, kind: Kind, run_id: tuple[str, str], now: Callable[[], float] = time.monotonic
    ) -> None:
        """run_id: the environment variable for the run's id, and the id."""
        self._folder, self._kind, self._run_id = folder, kind, run_id
        self._now = now
        self._start_again_at: float | None = None
        self._port = 0
        self._child = self._start()
        self._port = self._wait_for_port()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def keep_alive(self) -> str | None:
        """Start it again if it died; returns what happened, for people, or None."""
        name = self._kind.name
        if self._start_again_at is not None:
            if self._now() >= self._start_again_at:
                self._start_again_at = None
                self._child = self._start()
                return f"{name} started again"
        elif (code := self._child.poll()) is not None:
            self._start_again_at = self._now() + RESTART_DELAY_S
            return f"{name} ended with code {code}, see {self._child.log}; starting it again"
        return None

    def kill(self, down_s: float) -> None:
        """SIGKILL; ``keep_alive`` starts it again once so many seconds have passed."""
        self._child.kill_tree()
        self._start_again_at = self._now() + down_s

    def signal(self, number: int) -> None:
        """Send it, and it alone, a signal, if it runs."""
        if self._child.poll() is None:
            os.kill(self._child.pid, number)

    def stop(self) -> str | None:
        """In good order, if it ends in time: a hub saves what it holds. Returns what people should know of that."""
        ran = self._child.poll() is None
        if ran:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)  # it alone: what it has started ends after it
        deadline = self._now() + STOP_WAIT_S
        while self._child.poll() is None and self._now() < deadline:
            time.sleep(0.02)
        code = self._child.poll()
        self._child.kill_tree()
        self._port_file.unlink(missing_ok=True)  # of one that was started again
        if code == 0 or not ran or not self._kind.saves:
            return None
        how = f"ended with code {code}" if code is not None else f"was killed after {STOP_WAIT_S:.0f} s"
        return (
            f"the {self._kind.name} {how}, so its last state may not be saved; islands bring theirs when the run goes on; "
            f"last line of {self._child.log}:\n{self._child.log_tail(1)}"
        )

    @property
    def _port_file(self) -> Path:
        return self._folder / f".{self._kind.name.lower()}-port.{os.getpid()}"

    def _start(self) -> Child:
        mark = (_MARK, str(self._folder))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHFT_")}
        environment |= {"PYTHONUNBUFFERED": "1", LAUNCHER_PID: str(os.getpid()), mark[0]: mark[1]}
        environment[self._run_id[0]] = self._run_id[1]
        return Child(
            [
                *(sys.executable, "-m", "torchtitan_diloco", *self._kind.command),
                *(self._kind.bind, f"127.0.0.1:{self._port}", "--port-file", str(self._port_file)),
            ],
            environment=environment,
            log=self._folder / f"{self._kind.name.lower()}.log",
            mark=mark,
        )

    def _wait_for_port(self) -> int:
        deadline = self._now() + START_WAIT_S
        try:
            while not self._port_file.exists():
                if (code := self._child.poll()) is not None or self._now() > deadline:
                    self._child.kill_tree()
                    what = (
                        f"ended with code {code}"
                        if code is not None
                        else f"did not listen within {START_WAIT_S:.0f} s"
                    )
                    raise UserError(
                        f"{self._kind.setting} is empty, so a {self._kind.name} was started here, but it {what}; "
                        f"last lines of {self._child.log}:\n{self._child.log_tail(6)}"
                    )
                time.sleep(0.05)
            return int(self._port_file.read_text())
        finally:
            self._port_file.unlink(missing_ok=True)


def require_reachable(address: str, setting: str, command: str, wait_s: float = REACH_WAIT_S) -> None:
    """Raise UserError, naming the setting, unless something accepts connections at http://HOST:PORT.

    command: starts what should be there.
    """
    place = host_and_port(address)
    if place is None:
        raise UserError(
            f"{setting}: {address!r} is not an address; give http://HOST:PORT, or nothing for one of our own"
        )
    if why := why_unreachable(address, wait_s):
        host, port = place
        raise UserError(
            f"{setting}: nothing answers at {address} ({why}); start "
            f"`torchtitan-diloco {command} {host}:{port}` there, correct the address, "
            "or leave it out and `run` starts one"
        )


def is_loopback(address: str) -> bool:
    """Whether the address can only be reached from this machine, so every peer is here."""
    host = urlsplit(address if "//" in address else f"http://{address}").hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
