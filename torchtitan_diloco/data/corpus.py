"""Random access to a prepared corpus through memory maps: nothing is copied but the rows asked for."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchtitan_diloco.data.manifest import Manifest, load_manifest
from torchtitan_diloco.errors import UserError


class Sequences(NamedTuple):
    """B sequences of length L as the model takes them, all int64 of shape [B, L]."""

    inputs: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """From 0 at the begin of each document and of each sequence."""
    labels: npt.NDArray[np.int64]


class _Block(NamedTuple):
    """A record batch as NumPy views into the mapped file (see packing.Block)."""

    tokens: npt.NDArray[np.unsignedinteger]
    start_offsets: npt.NDArray[np.int32]
    start_columns: npt.NDArray[np.uint32]


class Corpus:
    """The sequences 0 .. len - 1 of a corpus folder, in the order of its documents.

    Raises UserError naming `setting` when the folder is not a whole prepared corpus.
    """

    def __init__(self, path: str | Path, *, setting: str = "data.sources.path") -> None:
        self.path = Path(path)
        self.manifest: Manifest = load_manifest(path, setting=setting)
        self._blocks: list[_Block] = []
        try:
            for record in self.manifest.files:
                if record.name.endswith(".arrow"):
                    self._map(self.path / record.name)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{setting}: {self.path} is damaged ({error}); remove it and prepare it again"
            ) from error
        self._first_rows = np.cumsum([0, *(len(block.tokens) for block in self._blocks)])
        if self._first_rows[-1] != len(self):
            raise UserError(
                f"{setting}: {self.path} holds {self._first_rows[-1]} sequences, its manifest says {len(self)}; "
                "remove it and prepare it again"
            )

    def __len__(self) -> int:
        return self.manifest.counts.sequences

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    def _map(self, file: Path) -> None:
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_stream(source).read_all()
        width = self.manifest.seq_len + 1
        for batch in table.to_batches():
            tokens, starts = batch.columns
            self._blocks.append(
                _Block(
                    tokens.values.to_numpy(zero_copy_only=True).reshape(-1, width),
                    starts.offsets.to_numpy(zero_copy_only=True),
                    starts.values.to_numpy(zero_copy_only=True),
                )
            )

    def read(self, ids: npt.NDArray[np.int64]) -> Sequences:
        """The sequences with these ids ([B], any order). Raises IndexError for an id that is not there."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sequence ids must be in [0, {len(self)})")
        length = self.manifest.seq_len
        tokens = np.empty((ids.size, length + 1), dtype=np.int64)
        document_start = np.zeros((ids.size, length), dtype=np.int64)
        numbers = np.searchsorted(self._first_rows, ids, side="right") - 1
        rows = ids - self._first_rows[numbers]
        for i, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
            block = self._blocks[number]
            tokens[i] = block.tokens[row]
            columns = block.start_columns[block.start_offsets[row] : block.start_offsets[row + 1]]
            document_start[i, columns] = columns
        inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
        # The input before a document's first is the last of the document before, which predicts EOS.
        label_rows, label_columns = np.nonzero(document_start)
        labels[label_rows, label_columns - 1] = self.manifest.tokenizer.eos_id
        np.maximum.accumulate(document_start, axis=1, out=document_start)
        positions = np.arange(length) - document_start
        return Sequences(np.ascontiguousarray(inputs), positions, labels)
