"""The files a corpus is made from: found, hashed, and read in pieces of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco import assets
from torchtitan_diloco.data.documents import DocumentReader
from torchtitan_diloco.data.manifest import FileRecord, sha256_file
from torchtitan_diloco.data.tables import datasets_files
from torchtitan_diloco.errors import UserError

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Input files in order; `setting` is how the user gave them."""

    paths: tuple[Path, ...]
    records: tuple[FileRecord, ...]
    text_key: str
    setting: str

    @classmethod
    def find(cls, inputs: Sequence[str | Path], text_key: str, setting: str) -> "Sources":
        """Hashes every file, or what ``bundled:NAME`` means. Raises UserError for one that is no readable file."""
        if not inputs:
            raise UserError(f"{setting}: no input file given")
        paths, records = [], []
        for name, path in named_files(inputs, setting):
            try:
                if path.exists() and not path.is_file():
                    raise UserError(f"{setting}: {path} is not a file")
                record = FileRecord(name=name, bytes=path.stat().st_size, sha256=sha256_file(path))
            except OSError as error:
                raise UserError(f"{setting}: cannot read {path}: {error.strerror}") from error
            paths.append(path)
            records.append(record)
        return cls(paths=tuple(paths), records=tuple(records), text_key=text_key, setting=setting)

    @property
    def size(self) -> int:
        """Bytes of all files as stored."""
        return sum(record.bytes for record in self.records)

    def batches(self) -> Iterator[tuple[int, list[str]]]:
        """(bytes read so far, documents), of all files, about a megabyte at a time."""
        before = 0
        for path, record in zip(self.paths, self.records, strict=True):
            batch: list[str] = []
            characters = 0
            with DocumentReader(path, text_key=self.text_key, setting=self.setting) as reader:
                for document in reader:
                    batch.append(document)
                    characters += len(document)
                    if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                        yield before + reader.bytes_read, batch
                        batch, characters = [], 0
            before += record.bytes
            yield before, batch


def named_files(inputs: Sequence[str | Path], setting: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file; a Hugging Face ``datasets`` folder stands for its Arrow files.

    Raises UserError naming ``setting`` for another folder.
    """
    for given in inputs:
        path = assets.resolve(given)
        if path.is_dir():
            yield from ((f"{path.name}/{file.name}", file) for file in datasets_files(path, setting))
        else:
            yield source_name(given), path


def source_name(given: str | Path) -> str:
    """Name in the manifest: ``bundled:NAME`` as it is, of a file the name without its folders."""
    return str(given) if str(given).startswith(assets.PREFIX) else Path(given).name
