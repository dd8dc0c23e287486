"""Packs tokenised documents into rows of seq_len + 1 tokens, losing and repeating no prediction.

Of a document t[0..n) the model is given t[0..n-1) and predicts t[1..n), as in TorchTitan's text loader:
nothing is predicted across a document's end, and the final token (EOS) is never an input. The inputs of all
documents form one stream, cut every seq_len tokens. A row stores its seq_len inputs and the label of its last
one; the other labels are the following inputs, except that where a document starts, the label before it is
EOS. If a document goes on in the next row, that row therefore begins with this row's final token. Inputs
behind the last whole row (fewer than seq_len) are left out.

`starts` of a row are the columns, in [0, seq_len), at which a document begins; positions restart there and at
the row's begin.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger]


class Block(NamedTuple):
    """Consecutive rows."""

    tokens: Tokens
    """[rows, seq_len + 1]"""
    start_offsets: npt.NDArray[np.int32]
    """[rows + 1]: row r's starts are start_columns[start_offsets[r]:start_offsets[r + 1]]"""
    start_columns: npt.NDArray[np.uint32]


class Packer:
    """Takes documents, gives blocks of exactly `rows_per_block` rows, and a shorter last one from `finish`."""

    def __init__(self, seq_len: int, rows_per_block: int, dtype: npt.DTypeLike) -> None:
        self._seq_len, self._rows = seq_len, rows_per_block
        self._inputs: Tokens = np.empty(0, dtype=dtype)
        self._labels: Tokens = np.empty(0, dtype=dtype)
        self._starts = np.empty(0, dtype=np.int64)  # in self._inputs
        self.documents = 0
        self.sequences = 0

    @property
    def pending(self) -> int:
        """Inputs that are in no block yet."""
        return int(self._inputs.size)

    def add(self, documents: Iterable[Tokens]) -> list[Block]:
        """Takes whole documents (BOS and EOS included) and returns the blocks that are full now."""
        usable = [document for document in documents if document.size > 1]
        lengths = np.array([document.size - 1 for document in usable], dtype=np.int64)
        starts = self.pending + np.cumsum(lengths) - lengths
        self._inputs = np.concatenate([self._inputs, *(document[:-1] for document in usable)])
        self._labels = np.concatenate([self._labels, *(document[1:] for document in usable)])
        self._starts = np.concatenate([self._starts, starts])
        self.documents += len(usable)
        blocks = []
        while self.pending >= self._rows * self._seq_len:
            blocks.append(self._cut(self._rows))
        return blocks

    def finish(self) -> list[Block]:
        """The last whole rows; fewer than seq_len inputs stay pending, in no row."""
        rows = self.pending // self._seq_len
        return [self._cut(rows)] if rows else []

    def _cut(self, rows: int) -> Block:
        size = rows * self._seq_len
        last_labels = self._labels[self._seq_len - 1 : size : self._seq_len]
        tokens = np.concatenate(
            [self._inputs[:size].reshape(rows, self._seq_len), last_labels[:, None]], axis=1
        )
        here = int(np.searchsorted(self._starts, size))
        row_of_start, columns = np.divmod(self._starts[:here], self._seq_len)
        offsets = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(np.bincount(row_of_start, minlength=rows), out=offsets[1:])
        self._inputs, self._labels = self._inputs[size:], self._labels[size:]
        self._starts = self._starts[here:] - size
        self.sequences += rows
        return Block(tokens, offsets, columns.astype(np.uint32))
