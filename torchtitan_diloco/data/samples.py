"""Opens what a ``[[data.sources]]`` table names, whatever its format, after checking that it is what it says."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.config.own import DataSource
from torchtitan_diloco.data.corpus import Corpus, Sequences
from torchtitan_diloco.data.prepare import check_fits, ensure_prepared


class Samples(Protocol):
    """Numbered sequences of equal length. ``digest`` is equal on two machines exactly when the sequences are."""

    @property
    def digest(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, ids: npt.NDArray[np.int64]) -> Sequences: ...


def open_samples(source: DataSource, tokenizer_dir: str | Path, seq_len: int) -> Samples:
    """Raises UserError when the source is absent, damaged, or was made for another tokenizer or sequence length."""
    ensure_prepared(source.path, source.prepare_from, tokenizer_dir, seq_len)
    corpus = Corpus(source.path)
    check_fits(corpus.manifest, source.path, tokenizer_dir, seq_len)
    return corpus
