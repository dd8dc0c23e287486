"""Megatron-LM corpora: ``NAME.bin`` (tokens) and ``NAME.idx`` (documents), memory-mapped.

The index ("MMIDIDX", version 1; ``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM, ``_IndexWriter``), all
little-endian: magic of 9 bytes, version uint64, dtype code uint8, number of sequences S uint64, number of documents D + 1
uint64, then S lengths in tokens int32, S begins in bytes int64, D + 1 indexes of each document's first sequence int64. (A
multimodal corpus has S modes int8 behind them.)

Samples are windows of seq_len + 1 tokens, each beginning at the last token of the one before, in the order of the file, as
Megatron's GPT dataset cuts them; tokens behind the last whole window are left out. Positions restart at documents, so that
attention does not cross them, which Megatron leaves to its ``reset_position_ids``. A document's last token predicts the first
of the next.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.corpus import Sequences
from torchtitan_diloco.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
_PIECE = 1 << 24  # bytes read at once
_SCANNED = 1 << 22  # tokens, or sequences, looked at at once


def is_megatron(path: str | Path) -> bool:
    """Whether a source's path means a Megatron corpus: its .bin or .idx."""
    return Path(path).suffix in (".bin", ".idx")


@dataclass(frozen=True, slots=True)
class Index:
    """Contents of an .idx: length and begin (bytes) of each sequence [S], and first sequence of each document [D + 1]."""

    dtype: np.dtype[np.generic]
    lengths: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """By the place of the last sequence; ``check`` makes sure that it is also the sum of the lengths."""
        if not len(self.lengths):
            return 0
        return int(self.begins[-1]) // self.dtype.itemsize + int(self.lengths[-1])


def read_index(path: Path, *, setting: str = "data.sources.path") -> Index:
    """Maps an .idx. Raises UserError naming ``setting`` when it cannot be read, or has another format or size."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{setting}: cannot read {path}: {error.strerror or error}") from error
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(
            f"{setting}: {path} is not the index of a Megatron corpus (it does not begin with MMIDIDX)"
        )
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{setting}: {path} has index version {version}; version 1 can be read")
    kind = DTYPES.get(code)
    if kind is None or not np.issubdtype(kind, np.integer):
        raise UserError(f"{setting}: {path} has tokens of type code {code}, which are not integers")
    plain = HEADER.size + 12 * sequences + 8 * documents
    if size not in (plain, plain + sequences) or documents < 1:
        raise UserError(
            f"{setting}: {path} has {size} bytes instead of {plain}: it is damaged or was cut off"
        )
    at = HEADER.size
    lengths = np.memmap(path, "<i4", "r", at, (sequences,)) if sequences else np.empty(0, "<i4")
    begins = (
        np.memmap(path, "<i8", "r", at + 4 * sequences, (sequences,)) if sequences else np.empty(0, "<i8")
    )
    starts = np.memmap(path, "<i8", "r", at + 12 * sequences, (documents,))
    return Index(np.dtype(kind).newbyteorder("<"), lengths, begins, starts)


def check_index(index: Index, path: Path, bin_bytes: int, *, setting: str = "data.sources.path") -> None:
    """Reads the whole index. Raises UserError unless its sequences lie one behind the other and fill the .bin exactly."""
    item, expected = index.dtype.itemsize, 0
    for first in range(0, len(index.lengths), _SCANNED):
        lengths = index.lengths[first : first + _SCANNED].astype(np.int64)
        begins = expected + np.concatenate([[0], np.cumsum(lengths * item)])
        if lengths.min(initial=0) < 0 or not np.array_equal(
            begins[:-1], index.begins[first : first + _SCANNED]
        ):
            raise UserError(f"{setting}: {path} is damaged: its sequences do not lie one behind the other")
        expected = int(begins[-1])
    starts = index.documents
    if starts[0] != 0 or starts[-1] != len(index.lengths) or bool((np.diff(starts) < 0).any()):
        raise UserError(f"{setting}: {path} is damaged: its documents do not cover its sequences")
    if bin_bytes != expected:
        raise UserError(
            f"{setting}: {path.with_suffix('.bin')} has {bin_bytes} bytes, its index says {expected}; copy both again"
        )


def check_megatron(path: Path, *, setting: str = "data.sources.path") -> Index:
    """The index of a corpus whose .bin and .idx are there and fit. Raises UserError naming ``setting`` otherwise."""
    idx, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    for file in (idx, tokens):
        if not file.is_file():
            raise UserError(
                f"{setting}: there is no {file}; a Megatron corpus is a .bin and an .idx of one name"
            )
    index = read_index(idx, setting=setting)
    check_index(index, idx, tokens.stat().st_size, setting=setting)
    return index


def scan_tokens(path: Path, index: Index, *, setting: str = "data.sources.path") -> tuple[str, int]:
    """(SHA-256, largest id; -1 without tokens) of a .bin, all of which is read.

    Raises UserError naming ``setting`` for negative ids, and when it cannot be read.
    """
    largest, hashed = -1, hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
                values = np.frombuffer(piece, index.dtype)
                largest = max(largest, int(values.max()))
                if int(values.min()) < 0:
                    raise UserError(
                        f"{setting}: {path} holds negative token ids; it is damaged, copy it again"
                    )
    except OSError as error:
        raise UserError(f"{setting}: cannot read {path}: {error.strerror or error}") from error
    return hashed.hexdigest(), largest


class MegatronCorpus:
    """Windows of ``seq_len + 1`` tokens of a Megatron corpus. digest, vocab_size: see ``stamp.identify_megatron``."""

    def __init__(self, path: Path, seq_len: int, digest: str, vocab_size: int) -> None:
        self.index = read_index(path.with_suffix(".idx"))
        self._seq_len, self._digest, self._vocab_size = seq_len, digest, vocab_size
        self._tokens = np.memmap(path.with_suffix(".bin"), self.index.dtype, "r", shape=(self.index.tokens,))

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def vocab_size(self) -> int:
        """Largest id in it plus one."""
        return self._vocab_size

    def __len__(self) -> int:
        return max(0, (self.index.tokens - 1) // self._seq_len)

    def read(self, ids: npt.NDArray[np.int64]) -> Sequences:
        """The windows with these ids ([B], any order). Raises IndexError for an id that is not there."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sequence ids must be in [0, {len(self)})")
        length = self._seq_len
        tokens = np.empty((ids.size, length + 1), dtype=np.int64)
        starts = np.zeros((ids.size, length), dtype=np.int64)
        item, documents = self.index.dtype.itemsize, self.index.documents
        for row, number in enumerate(ids.tolist()):
            begin = number * length
            tokens[row] = self._tokens[begin : begin + length + 1]
            # Sequences that begin in the window, and of those the first ones of documents.
            low, high = np.searchsorted(self.index.begins, [begin * item, (begin + length) * item])
            first = documents[np.searchsorted(documents, low) : np.searchsorted(documents, high)]
            columns = self.index.begins[first] // item - begin if len(first) else np.empty(0, np.int64)
            starts[row, columns] = columns
        np.maximum.accumulate(starts, axis=1, out=starts)
        return Sequences(
            np.ascontiguousarray(tokens[:, :-1]), np.arange(length) - starts, tokens[:, 1:].copy()
        )
