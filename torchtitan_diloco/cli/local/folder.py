"""The run folder as the launcher sees it: its lock, what an earlier run left in it, config.toml and run.json."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_diloco.errors import UserError, unwritable
from torchtitan_diloco.observe.reading import read_island, read_state

LOCK = ".lock"
CONFIG = "config.toml"
RUN = "run.json"
SERVER_LOGS = ("lighthouse.log", "hub.log")
HUB_STATE = "syncer"

# What the first minutes of a run need at least: its own small files, logs and the first events.
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What the run trains on."""

    manifests: list[str] = field(default_factory=list)
    """Digest of each source's manifest, in order."""
    tokenizer: str | None = None
    """Its SHA-256 (config.tokenizer.tokenizer_digest)."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run left behind."""

    run_id: str
    created: str
    config_file: Path
    data: DataIdentity
    states: dict[int, str]
    """Island -> the state it wrote last ("" where it wrote none)."""
    begun: bool = True
    """Whether an island has trained, so that there is something to continue."""

    def unfinished(self, num_islands: int) -> list[int]:
        """Islands of `num_islands` that have not written `done`."""
        return [i for i in range(num_islands) if self.states.get(i) != "done"]


class RunFolder:
    """`<job.dump_folder>/<job.name>`, locked by this process from construction to `close` (or its death)."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Create the folder if need be and lock it.

        Raises UserError where it cannot be written (naming job.dump_folder) or another `run` holds it (naming that).
        """
        self.path = path
        self._now = now
        self._made: list[Path] = []
        self._lock = -1
        try:
            self._make(path)
            self._acquire()
            self._probe()
        except OSError as error:
            self.abandon()
            raise unwritable(path, error) from None
        except UserError:
            self.close()
            raise

    def is_empty(self) -> bool:
        """Whether it holds nothing but the lock."""
        return all(entry.name == LOCK for entry in self.path.iterdir())

    def earlier(self) -> Earlier | None:
        """The run that this folder holds, if any."""
        states = {}
        begun = False
        for island in self.path.glob("island-*"):
            number = island.name.removeprefix("island-")
            if number.isdigit() and island.is_dir():
                state = read_state(island)
                states[int(number)] = state.state if state else ""
                begun |= any(island.glob("*/step-*")) or read_island(island).step > 0
        try:
            run = json.loads((self.path / RUN).read_text(encoding="utf-8"))
            if (self.path / CONFIG).is_file():
                data = DataIdentity(
                    manifests=list(run["digests"]["data"]), tokenizer=run["digests"]["tokenizer"]
                )
                return Earlier(
                    str(run["run_id"]), str(run["created"]), self.path / CONFIG, data, states, begun
                )
        except FileNotFoundError:
            if not states and not (self.path / CONFIG).exists():
                return None
        except (ValueError, KeyError, TypeError):
            pass
        raise UserError(
            f"{self.path} (job.dump_folder/job.name) holds islands but no readable {RUN} and {CONFIG}; "
            "give --fresh to move it aside, or another job.name"
        )

    def move_aside(self) -> Path:
        """Rename the folder to `<name>.<YYYYmmdd-HHMMSS>`, returned, and lock a new empty one in its place."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._now()))
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}-{count}")
        try:
            self.path.rename(aside)
            (aside / LOCK).unlink()
            os.close(self._lock)
            self._make(self.path)
            self._acquire()
        except OSError as error:
            raise unwritable(self.path, error) from None
        return aside

    def clear(self) -> None:
        """Remove what a run wrote that has not trained. Raises UserError where the disk refuses."""
        try:
            for entry in self.path.iterdir():
                if entry.name in (CONFIG, RUN, *SERVER_LOGS):
                    entry.unlink()
                elif entry.name.startswith("island-") or entry.name == HUB_STATE:
                    shutil.rmtree(entry)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def write(self, config_text: str, run: dict[str, Any]) -> None:
        """Write config.toml and run.json, each whole or not at all. Raises UserError where the disk refuses."""
        try:
            write_atomically(self.path / CONFIG, config_text)
            write_atomically(self.path / RUN, json.dumps(run, indent=2) + "\n")
        except OSError as error:
            self.abandon()
            raise unwritable(self.path, error) from None

    def abandon(self) -> None:
        """Give up before anything was started: remove what this object made, then unlock."""
        if self._made:
            for name in (CONFIG, RUN, LOCK):
                (self.path / name).unlink(missing_ok=True)
            for folder in reversed(self._made):
                try:
                    folder.rmdir()
                except OSError:
                    break  # somebody else uses it by now, for instance a corpus prepared into it
        self.close()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def _acquire(self) -> None:
        path = self.path / LOCK
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = (
                    os.read(lock, 4096).decode(errors="replace").strip()
                    or "a process that has not named itself yet"
                )
                os.close(lock)
                self._made.clear()
                raise UserError(
                    f"{self.path} is in use by another `run` ({holder}); wait for it, "
                    "stop it, or give another --job.name"
                ) from None
            # Between open and flock the holder may have moved its folder aside: then this lock guards another one.
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                break
            os.close(lock)
        self._lock = lock
        os.ftruncate(lock, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._now()))
        os.write(lock, f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode())

    def _probe(self) -> None:
        probe = self.path / f".probe.{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds all of `text`; on failure nothing is left and the old one stays. OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def run_record(
    *,
    name: str,
    config_text: str,
    data: DataIdentity,
    ranks: Sequence[int],
    earlier: Earlier | None,
    now: float,
) -> dict[str, Any]:
    """The content of run.json; `run_id` and `created` are those of `earlier` where a run is continued."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {
        "run_id": earlier.run_id if earlier else str(uuid.uuid4()),
        "name": name,
        "created": earlier.created if earlier else stamp,
        "started": stamp,
        "islands": len(ranks),
        "ranks": list(ranks),
        "versions": {
            "python": platform.python_version(),
            **{
                package: _version(package)
                for package in ("torchtitan_diloco", "torch", "torchtitan", "torchft")
            },
        },
        "digests": {
            "config": hashlib.sha256(config_text.encode()).hexdigest(),
            "data": data.manifests,
            "tokenizer": data.tokenizer,
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
