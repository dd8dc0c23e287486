"""Child processes of the launcher: started so that none outlives it, stopped with everything below them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from torchtitan_diloco.process import die_with_parent

STOP_WAIT_S = 3.0

_own: set[int] = set()
"""Process ids whose end a `Child` has still to collect."""


class Child:
    """One direct child in its own session, output appended to a file.

    Start it from the main thread only: the kernel ties the parent-death signal to the *thread* that forked.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, mark: tuple[str, str]
    ) -> None:
        """`mark` is a name and value in `environment` that only this child's tree carries.

        Raises OSError if the log cannot be written or the program does not start.
        """
        assert environment.get(mark[0]) == mark[1]
        self.log = log
        self._mark = mark
        log.parent.mkdir(parents=True, exist_ok=True)
        launcher = os.getpid()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                # Safe here although it runs between fork and exec: the launcher has no other threads.
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent=launcher),
            )

        _own.add(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status (negative: signal number) or None while it runs."""
        code = self._process.poll()
        if code is not None:
            _own.discard(self.pid)
        return code

    def workers(self) -> list[psutil.Process]:
        """Its direct children that are trainer ranks (`--island.id` on their command line)."""
        found = []
        for process in _children(self.pid, recursive=False):
            try:
                if "--island.id" in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def signal_group(self, number: int) -> None:
        """Signal the child's own process group (torchrun's workers are sessions of their own, so not in it)."""
        if self.poll() is None:
            # It may have ended since the poll.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_tree(self) -> None:
        """SIGKILL it and everything that carries its mark, orphans included, and wait until they are gone."""
        tree = _children(self.pid, recursive=True)
        self.signal_group(signal.SIGKILL)
        kill_all([*tree, *(p for p in _children(os.getpid(), recursive=True) if self._carries_mark(p))])
        # A process stuck in the kernel ends when its call returns; waiting longer for it would help nobody.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_WAIT_S)
        self.poll()
        _reap_adopted()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def _carries_mark(self, process: psutil.Process) -> bool:
        try:
            return process.pid != self.pid and bool(process.environ().get(self._mark[0]) == self._mark[1])
        except (psutil.Error, OSError):
            return False


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each and wait a short time for their end; a pid that was reused meanwhile is left alone (psutil)."""
    processes = list(processes)
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=STOP_WAIT_S)


def sweep() -> None:
    """The last resort before the launcher ends: SIGKILL every descendant that is still there."""
    kill_all(_children(os.getpid(), recursive=True))


def _reap_adopted() -> None:
    """Collect ended processes that became ours by their parent's death: nobody else does, so they stay zombies."""
    for process in _children(os.getpid(), recursive=False):
        if process.pid not in _own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _children(pid: int, *, recursive: bool) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=recursive)
        return found
    except psutil.NoSuchProcess:
        return []
