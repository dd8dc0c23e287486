"""The files a corpus is made from: found, hashed, and read in pieces of bounded size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco import assets
from torchtitan_diloco.data.documents import DocumentReader
from torchtitan_diloco.data.manifest import FileRecord, sha256_file
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
        for given in inputs:
            path = assets.resolve(given)
            try:
                if path.exists() and not path.is_file():
                    raise UserError(f"{setting}: {path} is not a file")
                record = FileRecord(
                    name=source_name(given), bytes=path.stat().st_size, sha256=sha256_file(path)
                )
            except OSError as error:
                raise UserError(f"{setting}: cannot read {path}: {error.strerror}") from error
            paths.append(path)
            records.append(record)
        return cls(paths=tuple(paths), records=tuple(records), text_key=text_key, setting=setting)

    @property
    def size(self) -> int:
        """Bytes of all files as stored."""
        return sum(record.bytes for record in self.records)

    def batches(self, on_bytes: Callable[[int], None]) -> Iterator[list[str]]:
        """Documents of all files, about a megabyte at a time; `on_bytes` hears how much has been read and used."""
        before = 0
        for path, record in zip(self.paths, self.records, strict=True):
            batch: list[str] = []
            characters = 0
            with DocumentReader(path, text_key=self.text_key, setting=self.setting) as reader:
                for document in reader:
                    batch.append(document)
                    characters += len(document)
                    if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                        yield batch
                        on_bytes(before + reader.bytes_read)
                        batch, characters = [], 0
            if batch:
                yield batch
            before += record.bytes
            on_bytes(before)


def source_name(given: str | Path) -> str:
    """Name in the manifest: ``bundled:NAME`` as it is, of a file the name without its folders."""
    return str(given) if str(given).startswith(assets.PREFIX) else Path(given).name
