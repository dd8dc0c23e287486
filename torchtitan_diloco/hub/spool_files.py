"""Messages as files in a folder that something outside mirrors: written once, verified before use, deleted when read.

    up/RUN/          from islands to the hub; each file is written, and deleted, by its island
    down/RUN/        from the hub to islands; by the hub
    refused/         what could not be used, and why; it is not mirrored

A message is a manifest, ``KIND.ISLAND.INCARNATION.SEQUENCE.SHA256.json``, and the parts that it names: files of raw bytes,
``.bin``, that are there before it. No file is ever changed, and no two have the same name. Files that begin with a dot are
in the making.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchtitan_diloco.durable import write_whole
from torchtitan_diloco.outer.policy import Member

logger = logging.getLogger(__name__)

FORMAT = 1
NOTE = "note"
"""The kind of a message that says all its predecessors have said; its writer keeps the newest only."""
MANIFEST_LIMIT = 16 << 20  # bytes
PIECE = 4 << 20
REFUSED_LIMIT = 100  # files that are set aside for people to look at

_LABEL = re.compile(r"[a-z]+(?:\.[0-9]{1,9})?")  # of a part
_NAME = re.compile(
    r"([a-z]+(?:-[0-9]{1,9})?)\.([0-9]{1,9})\.([A-Za-z0-9_-]{1,80})\.([0-9]{1,15})\.([0-9a-f]{64})\.(json|bin)"
)


@dataclass(frozen=True, slots=True)
class Name:
    """What a file's name says. member: the island's, whoever writes. sha256: of the content."""

    kind: str
    member: Member
    sequence: int
    sha256: str
    suffix: str

    def __str__(self) -> str:
        member = f"{self.member.island}.{self.member.incarnation}"
        return f"{self.kind}.{member}.{self.sequence}.{self.sha256}.{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> "Name | None":
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        kind, island, incarnation, sequence, sha256, suffix = match.groups()
        name = cls(kind, Member(int(island), incarnation), int(sequence), sha256, suffix)
        return name if str(name) == text else None  # one way to write each


@dataclass(frozen=True, slots=True)
class Message:
    """One that is here whole and undamaged. started: epoch seconds of the island's incarnation. parts: label -> file."""

    name: Name
    started: float
    body: dict[str, Any]
    parts: dict[str, Path]

    @property
    def member(self) -> Member:
        return self.name.member


class Damaged(Exception):
    """A file is not what its name, or the manifest, says."""


class Outbox:
    """A folder for messages that this side writes. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def part(self, kind: str, member: Member, sequence: int, data: memoryview) -> dict[str, Any]:
        """Write a part of the message to come; what the manifest says of it. data: of bytes. Raises OSError."""
        digest = hashlib.sha256(data).hexdigest()
        name = str(Name(kind, member, sequence, digest, "bin"))
        self._write(name, data)
        return {"file": name, "bytes": len(data)}

    def send(
        self, kind: str, member: Member, sequence: int, started: float, body: Mapping[str, Any],
        parts: Mapping[str, dict[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """Write the manifest, with which the message is complete; its name. Raises OSError."""
        content = {"format": FORMAT, "started": started, "body": body, "parts": dict(parts or {})}
        data = json.dumps(content).encode()
        name = str(Name(kind, member, sequence, hashlib.sha256(data).hexdigest(), "json"))
        self._write(name, memoryview(data))
        return name

    def _write(self, name: str, data: memoryview) -> None:
        path = self._folder / name
        if not path.exists():  # a name stands for one content
            write_whole(path, (data[at : at + PIECE] for at in range(0, len(data), PIECE)))

    def intact(self, name: str) -> bool:
        """Whether one's own copy of a file is what its name says."""
        parsed = Name.parse(name)
        try:
            return parsed is not None and sha256_of(self._folder / name) == parsed.sha256
        except (OSError, Damaged):
            return False

    def names(self, chosen: Callable[[Name], bool]) -> list[Name]:
        found = [Name.parse(name) for name in os.listdir(self._folder)]
        return [name for name in found if name is not None and chosen(name)]

    def remove(self, chosen: Callable[[Name], bool]) -> None:
        """Delete whole messages: manifests before their parts, so that nobody takes one for complete."""
        for name in sorted(self.names(chosen), key=lambda n: n.suffix != "json"):
            (self._folder / str(name)).unlink(missing_ok=True)

    def collect(self, island: int, read: Collection[str]) -> None:
        """Delete the messages from, or to, an island whose manifests were read."""
        over = {
            (n.member, n.sequence)
            for n in map(Name.parse, read)
            if n is not None and n.member.island == island
        }
        self.remove(lambda n: (n.member, n.sequence) in over)

    def sweep(self, chosen: Callable[[Name], bool]) -> None:
        """Delete what a process that was killed has left: files in the making, and parts that no manifest names."""
        for path in self._folder.iterdir():
            base = Name.parse(path.name[1:].rpartition(".")[0]) if path.name.startswith(".") else None
            if base is not None and chosen(base):
                path.unlink(missing_ok=True)
        said = {(n.member, n.sequence) for n in self.names(lambda n: n.suffix == "json")}
        self.remove(
            lambda n: n.suffix == "bin" and (n.member, n.sequence) not in said and chosen(n),
        )


class Inbox:
    """A folder of messages that the other side writes. Not thread-safe.

    listed: the names that were here at the last ``scan``. refused: files that were set aside, of late.
    """

    def __init__(self, folder: Path, refused: Path, mine: Callable[[Name], bool] = lambda name: True) -> None:
        """mine: of the messages of other readers nothing is looked at. Raises OSError."""
        self._folder, self._refused, self._mine = folder, refused, mine
        folder.mkdir(parents=True, exist_ok=True)
        refused.mkdir(parents=True, exist_ok=True)
        self._taken: set[str] = set()
        self._verified: set[str] = set()  # parts of messages that are not complete yet
        self.listed: set[str] = set()
        self.refused: list[str] = []

    def scan(self) -> list[Message]:
        """The messages that have become complete since, in their writers' order. Raises OSError."""
        try:
            self.listed = {name for name in os.listdir(self._folder) if not name.startswith(".")}
        except FileNotFoundError:
            self.listed = set()  # the mirror deletes folders that the other side has not made yet
        self._taken &= self.listed
        self._verified &= self.listed
        found = []
        for text in sorted(self.listed - self._taken):
            name = Name.parse(text)
            if name is None:
                self._set_aside(text, "it is no file of ours")
            elif name.suffix == "json" and self._mine(name):
                try:
                    message = self._read(name)
                except FileNotFoundError:
                    continue  # deleted at this moment
                except Damaged as damaged:
                    self._set_aside(text, str(damaged))
                    continue
                if message is not None:
                    self._taken.add(text)
                    found.append(message)
        return sorted(found, key=lambda m: (m.started, m.name.sequence))

    def again(self, member: Member, sequence: int) -> None:
        """Give this message out once more."""
        for text in list(self._taken):
            name = Name.parse(text)
            if name is not None and (name.member, name.sequence) == (member, sequence):
                self._taken.discard(text)

    def _read(self, name: Name) -> Message | None:
        """None while some part is not here. Raises Damaged."""
        data = read_file(self._folder / str(name), MANIFEST_LIMIT)
        if hashlib.sha256(data).hexdigest() != name.sha256:
            raise Damaged("its content is not what its name says")
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise ValueError(f"it has format {content['format']!r}, this version reads {FORMAT}")
            started, body = float(content["started"]), content["body"]
            parts = {str(label): (str(p["file"]), int(p["bytes"])) for label, p in content["parts"].items()}
            if not isinstance(body, dict) or not math.isfinite(started):
                raise ValueError("its body is no object, or its start no time")
            for label, (file, _) in parts.items():
                part = Name.parse(file)
                if not _LABEL.fullmatch(label):
                    raise ValueError(f"{label!r} is no part")
                if (
                    part is None
                    or part.suffix != "bin"
                    or (part.member, part.sequence) != (name.member, name.sequence)
                ):
                    raise ValueError(f"{file!r} is no part of it")  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise Damaged(f"not a manifest: {error!r}") from None
        here = [self._part_is_here(file, nbytes) for file, nbytes in parts.values()]
        if not all(here):
            return None
        return Message(
            name, started, body, {label: self._folder / file for label, (file, _) in parts.items()}
        )

    def _part_is_here(self, file: str, nbytes: int) -> bool:
        if file in self._verified:
            return True
        if file not in self.listed:
            return False
        path, name = self._folder / file, Name.parse(file)
        assert name is not None
        try:
            size = path.lstat().st_size
            if size != nbytes:
                raise Damaged(f"it has {size} bytes, not {nbytes}")
            if sha256_of(path) != name.sha256:
                raise Damaged("its content is not what its name says")
        except FileNotFoundError:
            return False
        except Damaged as damaged:
            self._set_aside(file, str(damaged))
            return False
        self._verified.add(file)
        with contextlib.suppress(ValueError):
            self.refused.remove(file)
        return True

    def _set_aside(self, text: str, why: str) -> None:
        """Out of the way, for people to look at; the mirror brings an undamaged copy, if there is one."""
        logger.warning("%s is set aside in %s: %s", self._folder / text, self._refused, why)
        self.refused = [*(name for name in self.refused if name != text), text][-REFUSED_LIMIT:]
        self.listed.discard(text)
        source, target = self._folder / text, self._refused / text
        self._taken.add(text)  # where it cannot be moved, it is at least not looked at again
        with contextlib.suppress(OSError):
            if target.exists() or len(os.listdir(self._refused)) >= 2 * REFUSED_LIMIT:
                source.unlink()
                self._taken.discard(text)
            else:
                source.rename(target)
                self._taken.discard(text)
                (self._refused / f"{text[:200]}.why").write_text(why + "\n")


def read_file(path: Path, limit: int) -> bytes:
    """Raises Damaged for anything but a regular file of at most ``limit`` bytes, FileNotFoundError."""
    with _open(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Damaged(f"it has more than {limit} bytes")
    return data


def read_into(path: Path, into: memoryview) -> None:
    """Fill ``into`` with the bytes of a part. Raises Damaged or OSError."""
    with _open(path) as file:
        if file.readinto(into) != len(into) or file.read(1):
            raise Damaged(f"{path} has not {len(into)} bytes")


def sha256_of(path: Path) -> str:
    """Raises Damaged or OSError."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> Any:
    """Nothing but a regular file: a link could lead anywhere, and a pipe would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged("it is no regular file")
    return open(descriptor, "rb")


def folders(spool: Path, run_id: str) -> tuple[Path, Path, Path]:
    """Of a run: what goes up, what comes down, and what is set aside."""
    run = quote(run_id, safe="").replace(".", "%2E")
    return spool / "up" / run, spool / "down" / run, spool / "refused"
