"""Opens what a ``[[data.sources]]`` table names, whatever its format, after checking that it is what it says."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_diloco import assets
from torchtitan_diloco.config.own import DataSource
from torchtitan_diloco.data.corpus import Corpus, Sequences
from torchtitan_diloco.data.megatron import MegatronCorpus, is_megatron
from torchtitan_diloco.data.prepare import ensure_prepared
from torchtitan_diloco.data.stamp import identify_megatron, verify_once
from torchtitan_diloco.data.tokenizer import load_tokenizer, tokenizer_sha256
from torchtitan_diloco.errors import UserError


class Samples(Protocol):
    """Numbered sequences of equal length. ``digest`` is equal on two machines exactly when the sequences are."""

    @property
    def digest(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, ids: npt.NDArray[np.int64]) -> Sequences: ...


def source_digest(source: DataSource, tokenizer_dir: str | Path, seq_len: int) -> str:
    """Digest of a source, which is prepared and checked first where that has not been done.

    Raises UserError when it is absent, damaged, or was made for another tokenizer or sequence length.
    """
    if is_megatron(source.path):
        return _identify(source, tokenizer_dir, seq_len)[0]
    ensure_prepared(source.path, source.prepare_from, tokenizer_dir, seq_len)
    return verify_once(source.path).digest


def open_samples(source: DataSource, tokenizer_dir: str | Path, seq_len: int) -> Samples:
    """The samples of a source, which is prepared and checked first. Raises UserError as ``source_digest`` does."""
    if is_megatron(source.path):
        digest, vocab_size = _identify(source, tokenizer_dir, seq_len)
        corpus = MegatronCorpus(Path(source.path), seq_len, digest, vocab_size)
        if len(corpus) == 0:
            raise UserError(
                f"data.sources.path: {source.path} has {corpus.index.tokens} tokens, fewer than one sequence of "
                f"training.seq_len {seq_len}"
            )
        return corpus
    source_digest(source, tokenizer_dir, seq_len)
    return Corpus(source.path)


def _identify(source: DataSource, tokenizer_dir: str | Path, seq_len: int) -> tuple[str, int]:
    if source.prepare_from:
        raise UserError(
            f"data.sources.prepare_from: {source.path} is a Megatron corpus, which is used as it is; remove the setting, "
            "or give a folder as path"
        )
    folder = assets.resolve(tokenizer_dir)
    digest, vocab_size = identify_megatron(Path(source.path), tokenizer_sha256(folder), seq_len)
    entries = _entries(folder)
    if entries is not None and vocab_size > entries:
        raise UserError(
            f"model.hf_assets_path: {source.path} holds the id {vocab_size - 1}, but the tokenizer {tokenizer_dir} has "
            f"only {entries} entries; it was made with another one"
        )
    return digest, vocab_size


def _entries(folder: Path) -> int | None:
    """Ids of a tokenizer; None where only TorchTitan can load it."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return max(load_tokenizer(file, "model.hf_assets_path").get_vocab().values()) + 1
