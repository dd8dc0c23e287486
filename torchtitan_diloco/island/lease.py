"""One start of an island at a time: whoever trains in its folder holds the lease there, and a second copy is refused.

The holder writes ``lease.json`` anew every few seconds. Nothing else can be relied on: file systems of clusters often have
no locks, or locks of one node only; clocks of two machines differ; Slurm can run two instances of one job at once.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_diloco.errors import UserError, unwritable
from torchtitan_diloco.observe.events import write_json

BEAT_S = 5.0
STALE_S = 30.0
"""How long the lease of a process that cannot be looked at has to stay as it is until it counts as dead."""

LEASE = "lease.json"


class Held(UserError):
    """Another start of the island is alive. Its folder is not to be written to."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an island. place, born: tell its process from others with that pid. folder: tells the island's from a copy,
    on one machine. beats: how often it has said so."""

    incarnation: str
    host: str
    pid: int
    place: str
    born: str
    folder: str
    job: str
    since: float
    beats: int

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{job}, since {since}"


UNREADABLE = Holder("", "an unknown host", 0, "", "", "", "", 0.0, 0)


class Lease:
    """What this process holds. lost: called, in a thread, with a sentence when somebody else has taken the island over.

    beat_s, stale_s: as ``BEAT_S`` and ``STALE_S``.
    """

    def __init__(
        self,
        folder: Path,
        island: int,
        incarnation: str,
        lost: Callable[[str], None],
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._path = folder / LEASE
        self._island = island
        self._lost, self._beat_s, self._stale_s = lost, beat_s, stale_s
        job, pid = os.environ.get("SLURM_JOB_ID", ""), os.getpid()
        host, born = socket.gethostname(), _born(pid)
        self._mine = Holder(incarnation, host, pid, _place(), born, "", job, time.time(), 0)
        self._released = threading.Event()
        self._writing = threading.Lock()

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the island from now on. Waits where it cannot be known yet whether the last holder lives, and says so.

        Raises Held when it does, UserError where the folder cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found = self._path.parent.stat()
            self._mine = replace(self._mine, folder=f"{found.st_dev}:{found.st_ino}")
            holder = self._holder()
            if holder is not None and not self._is_dead(holder):
                self._watch(holder, say)
            write_json(self._path, asdict(self._mine))
        except OSError as error:
            raise unwritable(self._path.parent, error) from None
        threading.Thread(target=self._beat, daemon=True, name="lease").start()

    def release(self) -> None:
        """Idempotent."""
        with self._writing:
            if not self._released.is_set():
                self._released.set()
                if self._holder() == self._mine:
                    self._path.unlink(missing_ok=True)

    def _is_dead(self, holder: Holder) -> bool:
        """Whether it is known to have ended, or to hold another folder, which only its own machine can know."""
        here = holder.place == self._mine.place
        return here and (holder.born != _born(holder.pid) or holder.folder != self._mine.folder)

    def _watch(self, holder: Holder, say: Callable[[str], None]) -> None:
        if holder.place != self._mine.place:
            say(
                f"island {self._island} was held by {holder}, and has not been given back; waiting at most "
                f"{self._stale_s:g} s for a sign of life"
            )
            deadline = time.monotonic() + self._stale_s
            while (now := self._holder()) in (holder, UNREADABLE):
                if time.monotonic() > deadline:
                    return
                time.sleep(min(0.5, self._stale_s / 10))
            if now is None:
                return
            holder = now
        raise Held(
            f"island.id: island {self._island} in {self._path.parent} is held by {holder}; stop that one or wait for its "
            "end, or give this one an island.id of its own"
        )

    def _holder(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):  # damaged, or a file system that has its moments
            return UNREADABLE

    def _beat(self) -> None:
        while not self._released.wait(self._beat_s):
            with self._writing:
                if self._released.is_set():
                    return
                holder = self._holder()
                if holder is UNREADABLE:
                    continue
                if holder not in (self._mine, None):
                    self._released.set()
                    self._lost(f"island {self._island} in {self._path.parent} was taken over by {holder}")
                    return
                # On a full disk the next try may work.
                with suppress(OSError):
                    following = replace(self._mine, beats=self._mine.beats + 1)
                    write_json(self._path, asdict(following))
                    self._mine = following


def _place() -> str:
    """The same for two processes that see one another's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _born(pid: int) -> str:
    """When a process here started, in the kernel's ticks; "" where there is none."""
    try:
        # The command's name, in brackets, may hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        # One that has ended stays until its parent has noticed, which some containers' first process never does.
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return ""
