"""What a source may be: a prepared corpus that is checked on its first use, or a Megatron corpus."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.documents import numbered_documents
from tests.helpers.megatron import CODES, some_documents, write_megatron
from torchtitan_diloco.cli import dispatch
from torchtitan_diloco.config.own import DataSource
from torchtitan_diloco.data import stamp
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.samples import open_samples, source_digest
from torchtitan_diloco.errors import UserError

SEQ_LEN = 8


@pytest.mark.parametrize("dtype", list(CODES))
def test_megatron_windows_follow_the_tokens_and_restart_positions_at_documents(
    tmp_path: Path, tokenizer_dir: Path, dtype: str
) -> None:
    documents = some_documents()
    path = write_megatron(tmp_path / "corpus", documents, dtype)
    samples = open_samples(DataSource(path=str(path)), tokenizer_dir, SEQ_LEN)
    flat = [t for document in documents for sequence in document for t in sequence]
    document_of = [n for n, document in enumerate(documents) for sequence in document for _ in sequence]
    assert len(samples) == (len(flat) - 1) // SEQ_LEN
    order = np.random.default_rng(0).permutation(len(samples))
    inputs, positions, labels = samples.read(order)
    for row, number in enumerate(order.tolist()):
        begin = number * SEQ_LEN
        assert inputs[row].tolist() == flat[begin : begin + SEQ_LEN]
        assert labels[row].tolist() == flat[begin + 1 : begin + SEQ_LEN + 1]
        expected, position = [], 0
        for column in range(SEQ_LEN):
            new = column == 0 or document_of[begin + column] != document_of[begin + column - 1]
            position = 0 if new else position + 1
            expected.append(position)
        assert positions[row].tolist() == expected
    with pytest.raises(IndexError):
        samples.read(np.array([len(samples)]))


def test_a_megatron_corpus_is_named_by_its_contents(
    tmp_path: Path, tokenizer_dir: Path, make_tokenizer: Callable[..., Path]
) -> None:
    (tmp_path / "copy").mkdir()
    one = write_megatron(tmp_path / "corpus", some_documents())
    two = write_megatron(tmp_path / "copy" / "other", some_documents())
    digest = source_digest(DataSource(path=str(one)), tokenizer_dir, SEQ_LEN)
    assert source_digest(DataSource(path=str(two.with_suffix(".idx"))), tokenizer_dir, SEQ_LEN) == digest
    assert source_digest(DataSource(path=str(one)), tokenizer_dir, 16) != digest
    assert source_digest(DataSource(path=str(one)), make_tokenizer("no bos"), SEQ_LEN) != digest


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, bin: idx.write_bytes(b"PK" + idx.read_bytes()[2:]), "is not the index of a Megatron corpus"),
        (lambda idx, bin: idx.write_bytes(idx.read_bytes()[:-8]), "is damaged or was cut off"),
        (lambda idx, bin: bin.write_bytes(bin.read_bytes()[:-2]), r"has \d+ bytes, its index says \d+"),
        (lambda idx, bin: bin.unlink(), r"there is no .*corpus\.bin"),
        (lambda idx, bin: idx.write_bytes(_changed(idx, 9, 2)), "has index version 2"),
        (lambda idx, bin: idx.write_bytes(_changed(idx, 17, 7)), "type code 7, which are not integers"),
        (lambda idx, bin: idx.write_bytes(_changed(idx, 34, 200)), "do not lie one behind the other"),
        (lambda idx, bin: bin.write_bytes(b"\xff\xff" + bin.read_bytes()[2:]), "holds the id 65535, but the tokenizer"),
    ],
)  # fmt: skip
def test_a_megatron_corpus_that_does_not_fit_is_refused(
    tmp_path: Path, tokenizer_dir: Path, damage: Callable[[Path, Path], object], message: str
) -> None:
    path = write_megatron(tmp_path / "corpus", some_documents())
    damage(path.with_suffix(".idx"), path)
    with pytest.raises(UserError, match=message):
        open_samples(DataSource(path=str(path)), tokenizer_dir, SEQ_LEN)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be loaded"),
        ('{"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}', "has no entries"),
    ],
)
def test_a_damaged_tokenizer_is_named_with_a_megatron_corpus(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = write_megatron(tmp_path / "corpus", some_documents())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=rf"model\.hf_assets_path: .*tokenizer\.json {problem}"):
        open_samples(DataSource(path=str(path)), tmp_path, SEQ_LEN)


def _changed(file: Path, at: int, value: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[at] = value
    return bytes(data)


def test_commands_show_and_verify_a_megatron_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_megatron(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5, 6]]])
    assert dispatch(["data", "inspect", str(path)]) == 0
    assert "2 documents in 3 sequences, 6 tokens (uint16)" in capsys.readouterr().out
    assert dispatch(["data", "verify", str(path)]) == 0
    assert "largest id 6" in capsys.readouterr().out
    path.write_bytes(b"")
    assert dispatch(["data", "verify", str(path)]) == 2
    path = write_megatron(tmp_path / "negative", [[[1, -2]]], "int32")
    capsys.readouterr()
    assert dispatch(["data", "verify", str(path)]) == 2
    assert "DIR: " in (shown := capsys.readouterr().err) and "holds negative token ids" in shown


# ---- prepared corpora ----------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tokenizer_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text("\n\n".join(numbered_documents(50)))
    prepare([tmp_path / "input.txt"], tokenizer_dir, SEQ_LEN, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_a_corpus_is_read_whole_on_its_first_use_only(
    corpus: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    verify = stamp.verify
    monkeypatch.setattr(stamp, "verify", lambda *a, **k: calls.append(a) or verify(*a, **k))
    for _ in range(3):
        source_digest(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)
    assert len(calls) == 1
    os.utime(corpus / "data-00000.arrow", ns=(1, 1))  # touched: looked at again
    open_samples(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)
    assert len(calls) == 2


def test_a_corpus_that_was_damaged_on_its_way_is_refused_on_first_use(
    corpus: Path, tokenizer_dir: Path
) -> None:
    data = bytearray((corpus / "data-00000.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (corpus / "data-00000.arrow").write_bytes(data)
    with pytest.raises(UserError, match=r"data-00000\.arrow has changed"):
        open_samples(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)
    (corpus / "data-00000.arrow").unlink()
    with pytest.raises(UserError, match="is missing"):
        open_samples(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)


def test_without_a_place_to_remember_it_is_checked_every_time(
    corpus: Path, tokenizer_dir: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("a file where the folder should be")
    for _ in range(2):
        source_digest(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)
    assert caplog.text.count("cannot remember that") == 2


def test_a_damaged_memory_is_not_believed(corpus: Path, tokenizer_dir: Path, own_cache: Path) -> None:
    digest = source_digest(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN)
    (file,) = (own_cache / "torchtitan_diloco").glob("checked-*.json")
    known = json.loads(file.read_text())
    file.write_text("{")
    assert source_digest(DataSource(path=str(corpus)), tokenizer_dir, SEQ_LEN) == digest
    assert json.loads(file.read_text()) == known
