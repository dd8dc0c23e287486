"""Reads documents one by one from a text, JSONL, Parquet or Arrow file, or a part of it, in flat memory."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from torchtitan_diloco.data.tables import TABLE_SUFFIXES, table_documents
from torchtitan_diloco.errors import UserError

# Only the text of a record is used: a number of any length is as good as another, and int() refuses very long ones.
_JSON = json.JSONDecoder(parse_int=float)
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


class DocumentReader:
    """The documents of one file, in file order; a context manager.

    ``*.parquet``, and the ``*.arrow`` files of a Hugging Face ``datasets`` folder, hold one document a row, its text in the
    column `text_key`.
    ``*.jsonl``, ``*.ndjson`` and ``*.json`` hold one JSON object a line, its text under `text_key`. Every
    other file is text: a run of lines without a blank one between them is a document, without its last line
    break. ``.gz`` on top is undone. The encoding is UTF-8. Empty documents are skipped.

    part: bytes [begin, end) of a text or JSONL file (see ``chunks``), or row groups of a Parquet file; None = all of it.

    Raises UserError, naming the file and line (and `setting`, by which the file was given), when it cannot be
    read.
    """

    def __init__(
        self,
        path: Path,
        *,
        text_key: str = "text",
        setting: str = "input",
        part: tuple[int, int] | None = None,
    ) -> None:
        self._path, self._text_key, self._setting, self._part = path, text_key, setting, part
        self._zipped = path.suffix == ".gz"
        self.is_table = path.name.endswith(TABLE_SUFFIXES)
        self.is_jsonl = path.name.removesuffix(".gz").endswith(JSONL_SUFFIXES)
        try:
            self._raw = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UserError(f"{setting}: cannot read {path}: {error.strerror or error}") from error

    def __enter__(self) -> "DocumentReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of the file (as stored) that have been read so far."""
        return self._raw.tell()

    def __iter__(self) -> Iterator[str]:
        if self.is_table:
            return table_documents(self._raw, self._path, self._text_key, self._setting, self._part)
        return self._json_documents() if self.is_jsonl else self._text_documents()

    def _error(self, line: int, problem: str) -> UserError:
        if self._part is not None:
            with open(self._path, "rb") as file:
                line += sum(block.count(b"\n") for block in _blocks(file, self._part[0]))
        return UserError(f"{self._setting}: {self._path}:{line}: {problem}")

    def _lines(self) -> Iterator[tuple[int, str]]:
        """(line number from 1, line without its end)"""
        stream: BinaryIO = self._raw
        if self._zipped:
            stream = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=self._raw), 1 << 20))
        number = 0
        first = 1 if self._part is None or self._part[0] == 0 else 0  # a byte order mark stands there only
        try:
            # Decoding line by line keeps the line number of a broken byte right.
            for number, line in enumerate(self._raw_lines(stream), 1):
                yield number, line.decode("utf-8-sig" if number == first else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self._error(number, f"not UTF-8 text ({error.reason})") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(number + 1, f"damaged gzip file ({error})") from error
        except OSError as error:
            raise self._error(number + 1, f"cannot be read ({error.strerror or error})") from error

    def _raw_lines(self, stream: BinaryIO) -> Iterator[bytes]:
        if self._part is None:
            yield from stream
            return
        begin, end = self._part
        stream.seek(begin)
        left = end - begin
        while left > 0 and (line := stream.readline()):
            left -= len(line)
            yield line

    def _text_documents(self) -> Iterator[str]:
        lines: list[str] = []
        for _, line in self._lines():
            if line.strip():
                lines.append(line)
            elif lines:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)

    def _json_documents(self) -> Iterator[str]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                record = _JSON.decode(line)
            except json.JSONDecodeError as error:
                raise self._error(
                    number, f"not JSON ({error.msg}); one JSON object a line is expected"
                ) from error
            except RecursionError as error:
                raise self._error(
                    number, "JSON that is nested too deeply; one flat object is expected"
                ) from error
            text = record.get(self._text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise self._error(number, f"no text under the key {self._text_key!r} (see --text-key)")
            try:
                text.encode("utf-8")
            except (
                UnicodeEncodeError
            ) as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
                raise self._error(number, f"text that is not Unicode ({error.reason})") from error
            if text.strip():
                yield text


def _blocks(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The first ``end`` bytes of a file, in pieces."""
    while end > 0 and (block := file.read(min(end, 1 << 20))):
        end -= len(block)
        yield block
