"""Tokenises chunks in worker processes. Every finished chunk is a file, so a killed preparation goes on where it was.

Workers import neither torch nor TorchTitan. Each has one thread of the tokenizers library: reading, tokenising and the
conversion of ids then all run side by side, where the library's own threads leave the last to one core.
"""

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.chunks import Chunk
from torchtitan_diloco.data.documents import DocumentReader

_BATCH_CHARACTERS = 1 << 18  # the library keeps some hundred bytes per token of a batch
_BATCH_DOCUMENTS = 1024
_DOCUMENT_TOKENS = 1 << 20  # handed to the packer at once

Tokens = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to turn text into ids; tokenizer: JSON of the ``tokenizers`` library."""

    tokenizer: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    dtype: str
    text_key: str
    setting: str


def identity(recipe: Recipe, chunks: Sequence[Chunk], sources: Sequence[str]) -> str:
    """Hash of all that decides the contents of the parts. sources: hashes of the input files."""
    record = [
        recipe.tokenizer, recipe.prefix, recipe.suffix, recipe.dtype, recipe.text_key,
        [(chunk.path.name, chunk.part) for chunk in chunks], list(sources),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


class Parts:
    """Parts of one preparation in ``folder``, which may hold some from a run of it that was killed."""

    def __init__(self, folder: Path, recipe: Recipe, chunks: Sequence[Chunk], key: str) -> None:
        self._folder, self._recipe, self._chunks = folder, recipe, chunks
        folder.mkdir(exist_ok=True)
        stamp = folder / "key"
        if not stamp.exists() or stamp.read_text() != key:
            for old in folder.iterdir():
                old.unlink()
            stamp.write_text(key)
        for unfinished in folder.glob("*.tmp"):
            unfinished.unlink()
        self.found = sum(self._path(number).exists() for number in range(len(chunks)))
        """Parts that are there already."""

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.npy"

    def documents(self, workers: int) -> Iterator[tuple[int, list[Tokens]]]:
        """(bytes of input that came before and with it, documents), a few at a time, in the order of the chunks.

        Raises what a worker raises: UserError for input that cannot be read, OSError when the disk is full.
        """
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, _start_worker, (self._recipe,)) as pool:
            futures: list[Future[None] | None] = [
                None if self._path(n).exists() else pool.submit(_make_part, chunk, self._path(n))
                for n, chunk in enumerate(self._chunks)
            ]
            done = 0
            try:
                for number, future in enumerate(futures):
                    if future is not None:
                        future.result()
                    done += self._chunks[number].bytes
                    for documents in _read_part(self._path(number)):
                        yield done, documents
            except BaseException:
                pool.shutdown(cancel_futures=True)  # waits for those at work: their folder is about to go
                raise

    def remove(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()


def _read_part(path: Path) -> Iterator[list[Tokens]]:
    """The documents of a part, a few at a time. The file holds two arrays: lengths of the documents, and all tokens."""
    with open(path, "rb") as file:
        lengths = np.load(file)
        tokens = np.load(file)
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        begin = int(ends[first] - lengths[first])
        last = int(np.searchsorted(ends, begin + _DOCUMENT_TOKENS, side="right"))
        last = max(first + 1, min(last, len(lengths)))
        borders = [begin, *ends[first:last].tolist()]
        yield [tokens[a:b] for a, b in zip(borders, borders[1:], strict=False)]  # noqa: RUF007
        first = last


# ---- in the worker -------------------------------------------------------------------------------------------------

_worker: "tuple[Recipe, object] | None" = None


def _start_worker(recipe: Recipe) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(recipe.tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _worker = recipe, tokenizer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make_part(chunk: Chunk, target: Path) -> None:
    assert _worker is not None
    recipe, tokenizer = _worker
    pieces: list[Tokens] = []
    lengths: list[int] = []

    def encode(texts: list[str]) -> None:
        ids: list[int] = []
        for encoding in tokenizer.encode_batch_fast(texts):  # type: ignore[attr-defined]
            before = len(ids)
            ids += recipe.prefix
            ids += encoding.ids
            ids += recipe.suffix
            lengths.append(len(ids) - before)
        pieces.append(np.array(ids, dtype=recipe.dtype))

    batch: list[str] = []
    characters = 0
    with DocumentReader(
        chunk.path, text_key=recipe.text_key, setting=recipe.setting, part=chunk.part
    ) as reader:
        for document in reader:
            batch.append(document)
            characters += len(document)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                encode(batch)
                batch, characters = [], 0
    if batch:
        encode(batch)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=recipe.dtype)
    temporary = target.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            np.save(file, np.array(lengths, dtype=np.int64))
            np.save(file, tokens)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
