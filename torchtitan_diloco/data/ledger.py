"""What every sample of a run was used for: ``island-<id>/ledger.jsonl``, append-only, and ``reading.json`` beside it.

Every island writes down every committed slot with the samples of *all* its participants, as their headers gave them, so one
surviving disk tells all. Entries are chained by lineage: a run that goes on from an older checkpoint leaves entries behind
that are on no chain any more, and ``audit`` passes over them. Lines are JSON objects with ``t`` (epoch seconds) and ``kind``:

- ``start``: an incarnation begins. seed, sources (name -> path, samples, shards), holds. slots is false where a sample
  counts once its inner step is done: with method "none", whose entries ``commit`` are its checkpoints, numbered by step.
- ``head``: the island stands here: at its entry, and after it took another's state. lineage, slot, tokens_total, positions.
- ``commit``: a slot. lineage, parent (lineage before), slot, tokens_total, consumed and skipped (island -> stream ->
  [from, to)), members (island -> shards it holds).
- ``dropped``: read and trained on, but no longer part of this island's weights. lineage, streams, cause.

``reading.json`` is overwritten after every inner step: lineage, and streams -> [from, to) read since its last entry.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.entries import is_entry
from torchtitan_diloco.durable import open_lines

LEDGER = "ledger.jsonl"
READING = "reading.json"

Ranges = Mapping[str, tuple[int, int]]
"""Stream -> [from, to)."""


class Ledger:
    """Writes one island's ledger. One process writes it at a time."""

    def __init__(self, folder: Path, island: int, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.island, self._clock = island, clock
        self._path = folder / LEDGER
        self._reading_path = folder / READING
        self._open: dict[str, tuple[int, int]] = {}
        self._lineage = ""
        self._file = open_lines(self._path)
        self._reading = os.open(self._reading_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)

    def begin(self, description: Mapping[str, Any], holds: Mapping[str, str]) -> None:
        """A new incarnation; what the one before had read and not committed is written down."""
        left = read_reading(self._reading_path)
        self._write("start", **description, holds=dict(holds))
        if left is not None and left["streams"]:
            missed = "its slot was committed" if description.get("slots", True) else "its next checkpoint"
            self._write("dropped", **left, cause=f"island {self.island} stopped before {missed}")
        self.read({})

    def head(self, lineage: str, slot: int, tokens_total: int, positions: Mapping[str, int]) -> None:
        """Where the island stands, after it entered or took another's state."""
        self._lineage = lineage
        values = {
            "lineage": lineage,
            "slot": slot,
            "tokens_total": tokens_total,
            "positions": dict(positions),
        }
        self._write("head", **values)

    def read(self, streams: Ranges) -> None:
        """All that the island's weights have been trained on since the last committed slot; replaces what was said before."""
        self._open = dict(streams)
        text = json.dumps({"lineage": self._lineage, "streams": self._open}, separators=(",", ":")) + "\n"
        data = text.encode()
        os.pwrite(self._reading, data, 0)
        os.ftruncate(self._reading, len(data))

    def drop(self, cause: str) -> None:
        """What was read is no longer part of the weights."""
        if self._open:
            self._write("dropped", lineage=self._lineage, streams=self._open, cause=cause)
        self.read({})

    def commit(
        self,
        *,
        slot: int,
        parent: str,
        lineage: str,
        tokens_total: int,
        consumed: Mapping[int, Ranges],
        skipped: Mapping[int, Ranges],
        members: Mapping[int, Mapping[str, str]],
    ) -> None:
        """A slot has been committed; this island's own reads are settled by it."""
        self._write(
            "commit",
            slot=slot,
            parent=parent,
            lineage=lineage,
            tokens_total=tokens_total,
            consumed=dict(sorted(consumed.items())),
            skipped=dict(sorted(skipped.items())),
            members=dict(sorted(members.items())),
        )
        self._lineage = lineage
        self.read({})

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            os.close(self._reading)

    def _write(self, kind: str, **values: Any) -> None:
        line = {"t": self._clock(), "kind": kind, "island": self.island, **values}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(entries in the order of writing, number of lines that could not be read). Raises OSError."""
    entries, broken = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                entry = json.loads(line)
                if not is_entry(str(entry["kind"]), entry):
                    raise ValueError
                entries.append({"kind": entry["kind"], **entry})
            except (ValueError, TypeError, KeyError, RecursionError):
                broken += 1
    return entries, broken


def read_reading(path: Path) -> dict[str, Any] | None:
    """``lineage`` and ``streams`` of a ``reading.json``; None where there is none or it is damaged."""
    try:
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        value = json.loads(first)
        if not is_entry("reading", value):
            return None
        return {"lineage": value["lineage"], "streams": value["streams"]}
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def ranges(before: Mapping[str, int], positions: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """From where each stream stood before to the new positions, where they differ."""
    return {
        name: (before.get(name, 0), end)
        for name, end in sorted(positions.items())
        if end > before.get(name, 0)
    }
