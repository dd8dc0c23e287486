"""Cuts input files into parts of whole documents, which processes can work on side by side and which survive a kill."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from torchtitan_diloco.data.documents import DocumentReader
from torchtitan_diloco.data.sources import Sources
from torchtitan_diloco.data.tables import row_groups

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file (see DocumentReader); None for the whole of it. bytes: of the input, for progress."""

    path: Path
    part: tuple[int, int] | None
    bytes: int


def cut(sources: Sources, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """All documents of all files, in order, in chunks of about ``chunk_bytes``.

    Compressed text and Arrow streams can only be read from their begin: one chunk a file.
    """
    chunks = []
    for path, record in zip(sources.paths, sources.records, strict=True):
        if path.suffix == ".parquet":
            chunks += list(_cut_parquet(path, record.bytes, chunk_bytes))
        elif path.suffix in (".gz", ".arrow") or record.bytes <= chunk_bytes:
            chunks.append(Chunk(path, None, record.bytes))
        else:
            chunks += list(_cut_text(path, record.bytes, chunk_bytes))
    return chunks


def _cut_text(path: Path, size: int, chunk_bytes: int) -> Iterator[Chunk]:
    with DocumentReader(path) as reader, open(path, "rb") as file:
        begin = 0
        while begin < size:
            end = _next_border(file, begin + chunk_bytes, size, blank=not reader.is_jsonl)
            yield Chunk(path, (begin, end), end - begin)
            begin = end


def _next_border(file: object, offset: int, size: int, *, blank: bool) -> int:
    """The first begin of a line from ``offset`` on, or of one that follows a blank line."""
    assert hasattr(file, "seek") and hasattr(file, "readline") and hasattr(file, "tell")
    if offset >= size:
        return size
    file.seek(offset)
    file.readline()
    if blank:
        while (line := file.readline()) and line.strip():
            pass
    return min(int(file.tell()), size)


def _cut_parquet(path: Path, size: int, chunk_bytes: int) -> Iterator[Chunk]:
    try:
        groups = row_groups(path)
    except (pa.ArrowException, OSError):
        yield Chunk(path, None, size)  # whoever reads it says what is wrong
        return
    begin, weight, stored = 0, 0, max(1, sum(groups))
    for number, group in enumerate(groups, 1):
        weight += group
        if weight >= chunk_bytes or number == len(groups):
            yield Chunk(path, (begin, number), size * weight // stored)
            begin, weight = number, 0


def workers_for(chunks: list[Chunk], jobs: int | None) -> int:
    """Processes to use: ``jobs``, or as many as this process has cores, but not more than there are chunks."""
    return max(1, min(jobs or len(os.sched_getaffinity(0)), len(chunks)))
