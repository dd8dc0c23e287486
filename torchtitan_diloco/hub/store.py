"""The hub's durable state: immutable files of tensors, a manifest that names a consistent set of them, and a journal.

    epoch            of the hub that was started last on this folder; one that finds another than its own stops
    journal.jsonl    a line for every settled slot, with its checksum, on the disk before any island can learn of it
    state.json       the manifest: terms, outer state, files with length and checksum, and a checksum of its own
    parts/           anchor and momentum of each fragment, one file for each version

What the journal has and the manifest has not, because the tensors were still on their way to the disk, some island may
hold; whom to ask is in the journal as well.

Lines of the journal are numbered, and the manifest says how many there were, so that lines a disk has lost are noticed. But
of those behind the last manifest nothing else tells: a file that ends there, at the end of a line, is that of a hub that was
killed before it wrote more. The hub then goes on with what it has, and islands that hold later state bring it when they join.
"""

import json
import logging
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan_diloco.durable import write_whole
from torchtitan_diloco.errors import UserError, unwritable
from torchtitan_diloco.hub.far import digest_of
from torchtitan_diloco.hub.parts import Parts, fragment_of
from torchtitan_diloco.hub.slot import Record
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)

FORMAT = 2
CHECKSUM = "xxh3_128"
RESIDUAL = "residual."


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a hub keeps of a run. records: of slots, by number. residuals: what the hub's own encoding has lost, see
    ``Merger.residuals``."""

    terms: Terms
    state: OuterState
    records: Sequence[Record] = ()
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found(Snapshot):
    """What an earlier hub has left, with records of slots that the state does not hold as well.

    members: islands that were in the run when it last settled a slot; they may hold later state than this.
    """

    members: tuple[int, ...] = ()


class Store(ABC):
    """epoch: of this hub; higher than that of any before it, whatever has become of their folder."""

    epoch = 0

    @abstractmethod
    def load(self) -> Found | None: ...

    @abstractmethod
    def commit(self, record: Record, members: Sequence[int]) -> None:
        """A slot is settled. It is on the disk when this returns. Raises Fenced, or UserError where the disk refuses."""

    @abstractmethod
    def save(self, run: Snapshot, at_once: bool = False) -> None:
        """The run as it is now; written in the background, and only as far as it is not there yet. Raises Fenced.

        at_once: it has to be written however short ago the last one was.
        """

    @abstractmethod
    def close(self) -> None:
        """What was given to ``save`` is on the disk when this returns. Raises UserError where it could not be written."""


class NoStore(Store):
    """Nothing outlasts the process."""

    def load(self) -> Found | None:
        return None

    def commit(self, record: Record, members: Sequence[int]) -> None:
        pass

    def save(self, run: Snapshot, at_once: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class Fenced(Exception):
    """Another hub was started on the same state; this one must not go on."""


class FileStore(Store):
    """every: committed versions between two saves of the tensors."""

    def __init__(self, folder: Path, every: int = 1, parts: Parts | None = None) -> None:
        """parts: where the tensors' files are; by default in the same folder. Raises UserError when it cannot be used."""
        self._folder, self._every = folder, every
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._parts = parts or Parts(folder / "parts")
            # By the clock as well: islands that have seen an epoch take none below it, even from an empty folder.
            self.epoch = max(self._last_epoch() + 1, int(time.time()))
            # Of two hubs that start at once, the one whose word stays there goes on.
            self._mine = f"{self.epoch} {secrets.token_hex(8)}\n"
            write_whole(folder / "epoch", [self._mine.encode()])
            self._lines = self._read_journal()
            self._count = self._lines[-1]["number"] + 1 if self._lines else 0
            self._journal = open(folder / "journal.jsonl", "ab")  # noqa: SIM115 - open as long as the hub is
        except OSError as error:
            raise unwritable(folder, error, "syncer.dir") from None
        self._versions = -1  # committed versions in the last save that was asked for
        self._pending: dict[str, Any] | None = None  # the next manifest
        self._unwritten: dict[str, tuple[str, torch.Tensor]] = {}  # file -> tensor's name, and tensor
        self._news = threading.Condition()
        self._closed = False
        self._fault: BaseException | None = None
        self._unsaved: UserError | None = None  # why the last save has failed
        self._known: dict[str, dict[str, Any]] = {}  # files that are there, as the manifest describes them
        self._thread = threading.Thread(target=self._run, daemon=True, name="hub-store")
        self._thread.start()

    def _last_epoch(self) -> int:
        path = self._folder / "epoch"
        try:
            return int(path.read_bytes().split()[0])
        except FileNotFoundError:
            return 0
        except (ValueError, IndexError):
            raise UserError(
                f"{path} is damaged; remove it, and make sure that no other hub runs there"
            ) from None

    def _check_epoch(self) -> None:
        try:
            found = (self._folder / "epoch").read_bytes()
        except OSError as error:
            raise unwritable(self._folder, error, "syncer.dir") from None
        if found != self._mine.encode():
            who = found.decode(errors="replace").partition(" ")[0]
            raise Fenced(f"another hub, number {who}, was started on {self._folder}")

    # ---- reading ---------------------------------------------------------------------------------------------------

    def load(self) -> Found | None:
        """Raises UserError naming the file that is damaged."""
        manifest = self._folder / "state.json"
        if not manifest.exists():
            return None  # whatever the run's state is, the islands that found it anew bring it with them
        try:
            data = _checked(manifest.read_bytes())
            if data["format"] != FORMAT:
                raise ValueError(f"it has format {data['format']!r}, this version reads {FORMAT}")
            terms = Terms.from_json(data["terms"])
            state = terms.blank()
            self._parts.of(terms)
            tensors = {name: self._parts.read(name, entry) for name, entry in data["files"].items()}
            state.restore(data["state"], tensors, digest_of)
            residuals = {name: t for name, t in tensors.items() if name.startswith(RESIDUAL)}
            records = {r.slot: r for r in map(Record.from_json, data["records"])}
            if self._count < data["journal"]:
                raise ValueError(
                    f"it knows of {data['journal']} lines of journal.jsonl, whose end is missing ({self._count})"
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{manifest} cannot be used: {error}; restore the folder from a copy, or move it away and start the hub "
                "without it: islands bring the run's state with them"
            ) from error
        self._known = {entry["file"]: entry for entry in data["files"].values()}
        self._parts.keep(self._known)
        self._versions = sum(held.version for held in state.states)
        members = tuple(range(terms.islands))
        for line in self._lines:
            record = Record.from_json(line["record"])
            members = tuple(line["members"])
            if record.slot >= state.slot or record.slot in records:
                records[record.slot] = record
        return Found(terms, state, sorted(records.values(), key=lambda r: r.slot), residuals, members)

    def _read_journal(self) -> list[dict[str, Any]]:
        """A last line that was cut off is removed: nobody has learnt of its slot. Raises UserError for any other damage."""
        path = self._folder / "journal.jsonl"
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: its last line was cut off, as when a hub is killed; it is removed", path)
            os.truncate(path, whole)
        lines = []
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                lines.append(_checked(line))
                # A hub that was fenced while it wrote has left a line that its successor has not counted.
                if lines[-1]["number"] not in (
                    (before := lines[-2]["number"] if number > 1 else -1),
                    before + 1,
                ):
                    raise ValueError("lines before it are missing")
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"{path} is damaged in line {number}: {error}; restore the folder from a copy, or move it away and "
                    "start the hub without it: islands bring the run's state with them"
                ) from None
        return lines

    # ---- writing ---------------------------------------------------------------------------------------------------

    def commit(self, record: Record, members: Sequence[int]) -> None:
        self._check_epoch()
        line = {"number": self._count, "record": record.to_json(), "members": list(members)}
        try:
            self._journal.write(_with_checksum(line) + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as error:
            raise unwritable(self._folder, error, "syncer.dir") from None
        self._count += 1
        self._check_epoch()  # a hub that was started meanwhile may have read the journal without this line

    def save(self, run: Snapshot, at_once: bool = False) -> None:
        self._check_epoch()
        versions = sum(held.version for held in run.state.states)
        if not at_once and self._versions >= 0 and 0 <= versions - self._versions < self._every:
            return
        self._versions = versions
        files = {}
        with self._news:
            if self._fault is not None:
                raise self._fault
            for name, tensor in {**run.state.tensors(), **run.residuals}.items():
                held = run.state.states[fragment_of(name)]
                # Where two histories meet in the same anchor, their momentum may differ.
                history = xxhash.xxh3_64_hexdigest((held.lineage + held.digest).encode())
                files[name] = f"{name}-v{held.version}-{history}.safetensors"
                if files[name] not in self._known:
                    self._unwritten[files[name]] = name, tensor
            self._pending = {
                "format": FORMAT,
                "epoch": self.epoch,
                "terms": run.terms.to_json(),
                "state": run.state.describe(),
                "files": files,
                "records": [record.to_json() for record in run.records],
                "journal": self._count,
            }
            # What a later version has replaced need not be written, or held, any more.
            self._unwritten = {f: what for f, what in self._unwritten.items() if f in files.values()}
            self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._pending is not None or self._closed)
                if self._pending is None:
                    return
                manifest, self._pending = self._pending, None
                unwritten = dict(self._unwritten)
            try:
                while unwritten:
                    file, (name, tensor) = unwritten.popitem()
                    self._write(file, name, tensor)
                    del tensor
                self._publish(manifest)
                self._unsaved = None
            except (OSError, UserError) as error:
                # The state before it is still whole, and the journal says what is missing.
                named = (
                    error if isinstance(error, UserError) else unwritable(self._folder, error, "syncer.dir")
                )
                self._unsaved = named
                logger.error(
                    "the state of slot %d is not saved: %s", manifest["state"]["slot"], self._unsaved
                )
            except BaseException as error:  # noqa: BLE001 - raised at the next save
                self._fault = error
                return

    def _write(self, file: str, name: str, tensor: torch.Tensor) -> None:
        entry = self._parts.write(file, name, tensor)
        with self._news:
            self._known[file] = entry
            self._unwritten.pop(file, None)

    def _publish(self, manifest: dict[str, Any]) -> None:
        """Name the files that are there; then those of earlier versions may go."""
        manifest["files"] = {name: self._known[file] for name, file in manifest["files"].items()}
        self._check_epoch()
        write_whole(self._folder / "state.json", [_with_checksum(manifest)])
        kept = {entry["file"] for entry in manifest["files"].values()}
        with self._news:
            if self._pending is not None:
                kept |= set(self._pending["files"].values())
            gone = self._known.keys() - kept
            self._known = {file: entry for file, entry in self._known.items() if file not in gone}
        self._parts.remove(gone)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join()
        with suppress(OSError):  # what it could not take before: nobody has learnt of that slot
            self._journal.close()
        if self._unsaved is not None:
            raise self._unsaved


def _with_checksum(content: dict[str, Any]) -> bytes:
    """A line of JSON that says what the rest of it has to be."""
    return json.dumps({**content, CHECKSUM: xxhash.xxh3_128_hexdigest(json.dumps(content).encode())}).encode()


def _checked(line: bytes) -> dict[str, Any]:
    """What ``_with_checksum`` was given. Raises ValueError for anything but its exact bytes."""
    content = json.loads(line)
    if (
        not isinstance(content, dict)
        or content.pop(CHECKSUM, None) is None
        or _with_checksum(content) != line
    ):
        raise ValueError("it does not match its checksum")
    return content
