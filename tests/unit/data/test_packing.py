"""Packing: every token of every document is predicted exactly once, from the tokens before it in its document."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.documents import BOS, EOS, numbered_documents
from torchtitan_diloco.data import writer
from torchtitan_diloco.data.corpus import Corpus
from torchtitan_diloco.data.packing import Block, Packer
from torchtitan_diloco.data.prepare import prepare


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """BOS, distinct tokens counted through, EOS."""
    numbers = iter(range(2, 60_000))
    return [np.array([BOS, *(next(numbers) for _ in range(n)), EOS], dtype=np.uint16) for n in lengths]


def test_two_small_documents_are_packed_as_written_here() -> None:
    packer = Packer(seq_len=4, rows_per_block=10, dtype=np.uint16)
    assert (
        packer.add([np.array([0, 11, 12, 1]), np.array([0, 21, 22, 23, 24, 25, 1]), np.array([0, 1])]) == []
    )
    (block,) = packer.finish()
    # Stream of inputs: 0 11 12 | 0 21 22 23 24 25 | 0
    assert block.tokens.tolist() == [
        [0, 11, 12, 0, 21],
        [21, 22, 23, 24, 25],
    ]
    assert block.start_offsets.tolist() == [0, 2, 2]
    assert block.start_columns.tolist() == [0, 3]
    assert (packer.documents, packer.sequences, packer.pending) == (3, 2, 2)


def test_a_document_that_ends_with_its_row_is_followed_by_a_fresh_row() -> None:
    packer = Packer(seq_len=3, rows_per_block=10, dtype=np.uint16)
    packer.add([np.array([0, 11, 12, 1]), np.array([0, 21, 22, 1])])
    (block,) = packer.finish()
    assert block.tokens.tolist() == [[0, 11, 12, 1], [0, 21, 22, 1]]
    assert block.start_offsets.tolist() == [0, 1, 2] and block.start_columns.tolist() == [0, 0]


def unpack(blocks: list[Block], seq_len: int) -> list[tuple[int, int, bool]]:
    """(input, label, whether a document starts) of all rows, by the rule in the module's docstring and nothing else."""
    pairs = []
    for block in blocks:
        for r, row in enumerate(block.tokens.tolist()):
            starts = block.start_columns[block.start_offsets[r] : block.start_offsets[r + 1]].tolist()
            for c in range(seq_len):
                pairs.append(
                    (row[c], EOS if c + 1 in starts and c + 1 < seq_len else row[c + 1], c in starts)
                )
    return pairs


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    seq_len=st.integers(1, 9),
    rows=st.integers(1, 5),
    pieces=st.integers(1, 4),
)
def test_every_token_is_predicted_exactly_once(
    lengths: list[int], seq_len: int, rows: int, pieces: int
) -> None:
    documents = documents_of(lengths)
    packer, blocks = Packer(seq_len, rows, np.uint16), []
    for i in range(0, len(documents), pieces):
        blocks += packer.add(documents[i : i + pieces])
    assert all(len(block.tokens) == rows for block in blocks)
    blocks += packer.finish()
    wanted = [
        (a, b, i == 0)
        for d in documents
        for i, (a, b) in enumerate(zip(d[:-1].tolist(), d[1:].tolist(), strict=True))
    ]
    got = unpack(blocks, seq_len)
    assert len(wanted) - len(got) == packer.pending < seq_len
    assert got == wanted[: len(got)]


def test_a_document_that_goes_on_repeats_its_last_token_as_the_next_rows_first() -> None:
    packer = Packer(seq_len=5, rows_per_block=2, dtype=np.uint16)
    block = packer.add(documents_of([30]))[0]
    assert block.tokens[0, -1] == block.tokens[1, 0]


@pytest.mark.parametrize(
    "kind", ["plain", "no bos", "one token for both", "adds both itself", "pads and truncates"]
)
def test_sequences_equal_those_of_torchtitans_text_loader(
    kind: str, make_tokenizer: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs, labels, positions and dtypes, over many rows, shards and record batches."""
    from datasets import Dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    folder, seq_len = make_tokenizer(kind), 16
    texts = [
        text.replace("w7 ", "<eos> ") for text in numbered_documents(300)
    ]  # special tokens spelled in the text
    (tmp_path / "input.txt").write_text("\n\n".join(texts))
    monkeypatch.setattr(writer, "BLOCK_BYTES", 700)
    monkeypatch.setattr(writer, "SHARD_BYTES", 2000)
    manifest = prepare([tmp_path / "input.txt"], folder, seq_len, tmp_path / "corpus")
    corpus = Corpus(tmp_path / "corpus")
    assert sum(record.name.endswith(".arrow") for record in manifest.files) > 2

    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder))
    tokenizer.tokenizer.no_padding()
    source = DatasetConfig(
        "", lambda path: Dataset.from_list([{"text": text} for text in texts]), lambda sample: sample["text"]
    )
    monkeypatch.setitem(text_datasets.DATASETS, "toy", source)
    theirs = list(text_datasets.HuggingFaceTextDataset("toy", None, tokenizer, seq_len))

    ours = corpus.read(np.arange(len(corpus)))
    assert len(theirs) == len(corpus) > 100
    for i, (batch, labels) in enumerate(theirs):
        assert ours.inputs[i].tolist() == batch["input"].tolist()
        assert ours.positions[i].tolist() == batch["positions"].tolist()
        assert ours.labels[i].tolist() == labels.tolist()


def test_a_large_vocabulary_is_stored_in_32_bits(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("w69999 w2 w65536")
    manifest = prepare([tmp_path / "input.txt"], make_tokenizer(words=70_000), 4, tmp_path / "corpus")
    assert manifest.dtype == "uint32"
    sequences = Corpus(tmp_path / "corpus").read(np.array([0]))
    assert sequences.inputs.tolist() == [[BOS, 69_999, 2, 65_536]] and sequences.labels.tolist() == [
        [69_999, 2, 65_536, EOS]
    ]
