"""Writes packed rows as a Hugging Face ``datasets`` folder (Arrow streams) and hashes their contents.

``datasets.load_from_disk`` opens the folder: columns ``tokens`` (fixed-size list of seq_len + 1) and
``starts`` (list). The files are written with pyarrow itself, as ``datasets`` puts random fingerprints into
its own.
"""

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchtitan_diloco.data.packing import Block

BLOCK_BYTES = 4 << 20
"""Size of a record batch, thus memory of the writer."""
MAX_SEQ_LEN = (1 << 31) - 2
"""Arrow counts the tokens of a row, one more than seq_len, in 32 bits."""
SHARD_BYTES = 1 << 30
"""Size after which the next file begins."""


def rows_per_block(seq_len: int, dtype: npt.DTypeLike) -> int:
    """Rows of a record batch; part of the format, as contents are hashed batch by batch."""
    return max(1, BLOCK_BYTES // ((seq_len + 1) * np.dtype(dtype).itemsize))


class CorpusWriter:
    """A context manager; `add` every block, then `close`, then read `content_sha256`.

    The hash is taken, block after block, over: the tokens row by row in the corpus' dtype, start_offsets as int32,
    start_columns as uint32, all little-endian.
    """

    def __init__(self, folder: Path, seq_len: int, dtype: npt.DTypeLike) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype)
        self._hash = hashlib.sha256()
        tokens = pa.list_(pa.from_numpy_dtype(self._dtype), seq_len + 1)
        self._schema = pa.schema([pa.field("tokens", tokens), pa.field("starts", pa.list_(pa.uint32()))])
        self._names: list[str] = []
        self._shard: tuple[BinaryIO, pa.RecordBatchStreamWriter] | None = None

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self._finish_shard()
        elif self._shard is not None:
            self._shard[0].close()

    @property
    def content_sha256(self) -> str:
        """Hash of everything added so far, as hex."""
        return self._hash.hexdigest()

    def add(self, block: Block) -> None:
        """Appends the rows of a block. Raises OSError, for example when the disk is full."""
        for array, kind in zip(block, (self._dtype, np.int32, np.uint32), strict=True):
            self._hash.update(np.ascontiguousarray(array, dtype=np.dtype(kind).newbyteorder("<")).data)
        flat = pa.array(np.ascontiguousarray(block.tokens).reshape(-1))
        columns = [
            pa.FixedSizeListArray.from_arrays(flat, block.tokens.shape[1]),
            pa.ListArray.from_arrays(pa.array(block.start_offsets), pa.array(block.start_columns)),
        ]
        if self._shard is None:
            self._names.append(f"data-{len(self._names):05d}.arrow")
            new = open(self._folder / self._names[-1], "wb")  # noqa: SIM115 - closed with the shard
            self._shard = new, pa.ipc.new_stream(new, self._schema)
        file, stream = self._shard
        stream.write_batch(pa.record_batch(columns, schema=self._schema))
        if file.tell() >= SHARD_BYTES:
            self._finish_shard()

    def close(self) -> list[str]:
        """Writes the two JSON files that ``datasets`` wants; returns the names of all files, in order."""
        self._finish_shard()
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._names],
            "_fingerprint": self.content_sha256[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        (self._folder / "dataset_info.json").write_text("{}\n")  # features follow from the Arrow schema
        return [*self._names, "dataset_info.json", "state.json"]

    def _finish_shard(self) -> None:
        if self._shard is not None:
            file, stream = self._shard
            self._shard = None
            with file:
                stream.close()
