"""Preparing in parallel, in parts, gives what preparing in one go gives, and goes on after a kill."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.helpers.documents import numbered_documents
from torchtitan_diloco.data import chunks as chunks_module
from torchtitan_diloco.data import prepare as prepare_module
from torchtitan_diloco.data.chunks import cut
from torchtitan_diloco.data.documents import DocumentReader
from torchtitan_diloco.data.parts import Parts
from torchtitan_diloco.data.prepare import prepare, verify
from torchtitan_diloco.data.sources import Sources
from torchtitan_diloco.errors import UserError

DOCUMENTS = [f"{text}\nw5 w6" if i % 3 == 0 else text for i, text in enumerate(numbered_documents(300))]


def write(folder: Path, kind: str) -> Path:
    file = folder / f"input.{kind}"
    if kind == "txt":
        file.write_text("\n\n\n".join(DOCUMENTS) + "\n")
    elif kind == "jsonl":
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), file, row_group_size=37)
    else:
        Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(folder / "input.datasets", num_shards=3)
    return file


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", 500)
    monkeypatch.setattr(prepare_module, "cut", lambda sources: cut(sources, 500))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("size", [1, 57, 500, 10**9])
def test_chunks_hold_every_document_once_and_in_order(tmp_path: Path, kind: str, size: int) -> None:
    file = write(tmp_path, kind)
    found = cut(Sources.find([file], "text", "input"), size)
    assert len(found) > 3 or size == 10**9 or kind == "parquet"
    documents: list[str] = []
    for chunk in found:
        with DocumentReader(file, part=chunk.part) as reader:
            documents += list(reader)
    assert documents == DOCUMENTS
    assert sum(chunk.bytes for chunk in found) == pytest.approx(file.stat().st_size, abs=len(found))


@pytest.mark.timeout(120)
def test_workers_make_the_same_corpus_from_every_format(
    tokenizer_dir: Path, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        kind: prepare([write(tmp_path, kind)], tokenizer_dir, 8, tmp_path / f"corpus-{kind}", jobs=2)
        for kind in ("txt", "parquet", "datasets")
    }
    monkeypatch.undo()
    alone = prepare([tmp_path / "input.txt"], tokenizer_dir, 8, tmp_path / "alone")
    assert {manifest.digest for manifest in made.values()} == {alone.digest}
    assert verify(tmp_path / "corpus-txt") == made["txt"]
    assert not list(tmp_path.glob(".*"))


def test_a_broken_line_in_a_late_chunk_is_named_by_its_number(
    tokenizer_dir: Path, tmp_path: Path, small_chunks: None
) -> None:
    file = write(tmp_path, "jsonl")
    lines = file.read_text().splitlines()
    lines[250] = "{"
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"input\.jsonl:251: not JSON"):
        prepare([file], tokenizer_dir, 8, tmp_path / "corpus", jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["input.jsonl"]


def test_a_table_without_text_is_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "input.parquet")
    with pytest.raises(UserError, match=r"no column 'text' with text .* text \(int64\), body \(string\)"):
        prepare([tmp_path / "input.parquet"], tokenizer_dir, 8, tmp_path / "corpus")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"bad\.parquet is damaged"):
        prepare([tmp_path / "bad.parquet"], tokenizer_dir, 8, tmp_path / "corpus")


SLOW = """
import sys, time
from torchtitan_diloco.data import chunks, parts, prepare
prepare.CHUNK_BYTES = 500
prepare.cut = lambda sources: chunks.cut(sources, 500)
read = parts._read_part
def slowly(path):
    time.sleep(0.05)
    return read(path)
parts._read_part = slowly
if __name__ == "__main__":
    prepare.prepare([sys.argv[1]], sys.argv[2], 8, sys.argv[3], jobs=1)
"""


@pytest.mark.timeout(120)
def test_after_a_kill_finished_parts_are_used_again(
    tokenizer_dir: Path, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = write(tmp_path, "txt"), tmp_path / "corpus"
    (tmp_path / "slow.py").write_text(SLOW)
    child = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), str(file), str(tokenizer_dir), str(output)]
    )
    folder = tmp_path / ".corpus.parts"
    deadline = time.monotonic() + 60
    while len(list(folder.glob("part-*.npy"))) < 5 and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not output.exists() and folder.exists()
    made: list[Path] = []
    found: list[int] = []
    original = Parts.documents

    def documents(self: Parts, workers: int):
        found.append(self.found)
        made.extend(folder.glob("part-*.npy"))
        return original(self, workers)

    monkeypatch.setattr(Parts, "documents", documents)
    manifest = prepare([file], tokenizer_dir, 8, output, jobs=1)
    assert found and found[0] >= 5
    monkeypatch.undo()
    assert manifest.digest == prepare([file], tokenizer_dir, 8, tmp_path / "alone").digest
    assert not folder.exists()


def test_parts_of_another_request_are_not_used(
    tokenizer_dir: Path, make_tokenizer: Callable[..., Path], tmp_path: Path, small_chunks: None
) -> None:
    stale = tmp_path / ".corpus.parts"
    stale.mkdir()
    (stale / "key").write_text("another")
    (stale / "part-000000.npy").write_bytes(b"nonsense")
    manifest = prepare([write(tmp_path, "txt")], tokenizer_dir, 8, tmp_path / "corpus", jobs=1)
    assert manifest.counts.documents == len(DOCUMENTS)


def test_chunks_are_not_cut_in_files_that_can_only_be_read_from_the_begin(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"x" * 100)
    assert [c.part for c in chunks_module.cut(Sources.find([tmp_path / "a.txt.gz"], "text", "i"), 10)] == [
        None
    ]
