"""``manifest.json`` of a prepared corpus: what it holds, how to tell two corpora apart, how to find damage."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchtitan_diloco.data.absent import remedy
from torchtitan_diloco.errors import UserError

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file: name (no folder), size in bytes, SHA-256 as hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRecord:
    """The tokenizer of the corpus."""

    sha256: str
    """See tokenizer.tokenizer_sha256."""
    path: str
    """As given when the corpus was prepared; for people only."""
    vocab_size: int
    """Largest id plus one."""
    bos_id: int | None
    eos_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What was packed."""

    documents: int
    sequences: int
    tokens: int
    """Predictions (labels) in all sequences: sequences x seq_len."""
    dropped_tokens: int
    """Predictions left out because they filled no whole sequence: fewer than seq_len."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is known of a prepared corpus."""

    format_version: int
    seq_len: int
    dtype: str
    """"uint16" or "uint32", little-endian."""
    tokenizer: TokenizerRecord
    counts: Counts
    content_sha256: str
    """Of the tokens and document starts themselves, whatever the file format; see prepare."""
    text_key: str
    files: tuple[FileRecord, ...] = field(default=())
    """Files of the corpus folder, without the manifest."""
    sources: tuple[FileRecord, ...] = field(default=())
    """Files the corpus was made from, in order."""

    @property
    def digest(self) -> str:
        """SHA-256 that is equal on two machines exactly when both train on the same sequences with the same tokenizer.

        Paths, file names, versions of libraries and times take no part.
        """
        record = [
            self.format_version,
            self.seq_len,
            self.dtype,
            self.tokenizer.sha256,
            asdict(self.counts),
            self.content_sha256,
        ]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Text of manifest.json; the same for equal manifests."""
        return json.dumps(asdict(self) | {"digest": self.digest}, indent=2, sort_keys=True) + "\n"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file as hex, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _what(value: Any) -> str:
    """What a JSON value is, in the words of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "text", float: "a fraction", int: "a number"}
    return names[type(value)]


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value of a field of this type, checked all the way down; ValueError says which field is not as it must be."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_what(value)} instead of an object")
        types = get_type_hints(kind)
        prefix = "" if where == "it" else f"{where}."
        for name in [name for name in types if name not in value] + sorted(value.keys() - types.keys()):
            raise ValueError(f"{prefix}{name} is {'missing' if name in types else 'unknown'}")
        return kind(**{name: _read(of, value[name], prefix + name) for name, of in types.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_what(value)} instead of a list")
        return tuple(_read(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    allowed = get_args(kind) or (kind,)
    if type(value) not in allowed:
        raise ValueError(f"{where} is {_what(value)} instead of {'text' if str in allowed else 'a number'}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{where} is {value}, below 0")
    return value


def _parse(data: dict[str, Any]) -> Manifest:
    digest = _read(str, data.pop("digest", None), "digest")
    manifest: Manifest = _read(Manifest, data, "it")
    if manifest.digest != digest:
        raise ValueError("its digest does not fit its contents")
    # Of these the digest knows nothing.
    if not any(record.name.endswith(".arrow") for record in manifest.files):
        raise ValueError("files names no data files")
    return manifest


def is_manifest(file: Path) -> bool:
    """Whether this is one of ours, damaged perhaps, and not something else of the same name."""
    try:
        return "format_version" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def load_manifest(path: str | Path, *, setting: str = "data.sources.path") -> Manifest:
    """The manifest of the corpus folder `path`.

    Raises UserError naming `setting` when there is none, or it is damaged or of another format version.
    """
    file = Path(path) / FILE_NAME
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it is {_what(data)} instead of an object")
        version = _read(int, data.get("format_version"), "format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{setting}: {path} has format version {version}, this release reads {FORMAT_VERSION}; prepare it again"
            )
        return _parse(data)
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise UserError(f"{setting}: cannot read {file}: {error.strerror or error}") from error
        raise UserError(f"{setting}: no prepared corpus at {path}: {remedy(path)}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{setting}: {file} is damaged ({error}); remove {path} and prepare it again"
        ) from error


def verify(path: str | Path, *, setting: str = "data.sources.path") -> Manifest:
    """Reads every byte of the corpus and compares sizes and hashes with the manifest.

    Raises UserError with one line per missing or changed file.
    """
    manifest = load_manifest(path, setting=setting)
    problems = _wrong_sizes(manifest, Path(path))
    for record in () if problems else manifest.files:
        file = Path(path) / record.name
        try:
            if sha256_file(file) != record.sha256:
                problems.append(f"{file} has changed: its SHA-256 is not {record.sha256}")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    _raise_damage(problems, path, setting)
    return manifest


def verify_sizes(path: str | Path, *, setting: str = "data.sources.path") -> Manifest:
    """As ``verify``, without reading the files: finds those that are missing or were cut off."""
    manifest = load_manifest(path, setting=setting)
    _raise_damage(_wrong_sizes(manifest, Path(path)), path, setting)
    return manifest


def _wrong_sizes(manifest: Manifest, path: Path) -> list[str]:
    problems = []
    for record in manifest.files:
        file = path / record.name
        try:
            size = file.stat().st_size
            if size != record.bytes:
                problems.append(f"{file} has {size} bytes instead of {record.bytes}")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    return problems


def _raise_damage(problems: list[str], path: str | Path, setting: str) -> None:
    if problems:
        raise UserError(
            "\n".join([*problems, f"{setting}: {path} is damaged; remove it and prepare it again"])
        )
