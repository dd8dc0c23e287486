"""Reading documents: text and JSONL, gzipped or not, and every way in which a file can be wrong."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan_diloco.data.documents import DocumentReader
from torchtitan_diloco.errors import UserError


def read(file: Path, text_key: str = "text") -> list[str]:
    with DocumentReader(file, text_key=text_key) as reader:
        documents = list(reader)
        assert reader.bytes_read == file.stat().st_size
    return documents


@pytest.mark.parametrize("packed", [False, True])
def test_text_documents_are_separated_by_blank_lines(tmp_path: Path, packed: bool) -> None:
    content = "\ufeff\none\nmore of one\r\n\n  \n\ntwo \u00e9\n\nthree".encode()
    file = tmp_path / ("a.txt.gz" if packed else "a.txt")
    file.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    assert read(file) == ["one\nmore of one", "two \u00e9", "three"]


def test_jsonl_documents_are_one_a_line_and_may_hold_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(
        gzip.compress(b'{"body": "one\\n\\nmore"}\n\n{"body": " "}\n{"body": "two", "text": 3}\n', mtime=0)
    )
    assert read(file, "body") == ["one\n\nmore", "two"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"fine\n\n\xff\xfe\n", "a.txt:3: not UTF-8 text"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: no text under the key 'text'"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: no text under the key 'text'"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl:1: JSON that is nested too deeply"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: no text under the key 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: text that is not Unicode"),
        ("a.txt.gz", b"plain text", "a.txt.gz:1: damaged gzip file"),
        ("a.txt.gz", gzip.compress(b"x\n" * 90, mtime=0)[:-9], "damaged gzip file"),
        (
            "a.txt.gz",
            gzip.compress(bytes(range(65, 91)) * 9, mtime=0)[:20] + b"\xff" * 30,
            "damaged gzip file",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with (
        pytest.raises(UserError, match=message),
        DocumentReader(tmp_path / name, setting="--input") as reader,
    ):
        list(reader)


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_file_that_cannot_be_opened_names_the_setting(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--input: cannot read"):
        DocumentReader(tmp_path / name, setting="--input")


def test_a_number_that_is_not_the_text_may_be_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": ' + "1" * 10_000 + "}\n")
    assert read(tmp_path / "a.jsonl") == ["one"]


@pytest.mark.parametrize("part", [None, (1, 2)])
@pytest.mark.parametrize(
    "bad, problem", [(None, "no text in the column 'text'"), (b"\xff", "not UTF-8 text")]
)
def test_a_row_of_a_table_without_text_is_named(
    tmp_path: Path, part: tuple[int, int] | None, bad: bytes | None, problem: str
) -> None:
    rows = pa.array([b"one", b"", b"two", bad], pa.binary()).cast(pa.string(), safe=False).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=2)
    with (
        pytest.raises(UserError, match=f"--input: .*a.parquet, row 4: {problem}"),
        DocumentReader(tmp_path / "a.parquet", setting="--input", part=part) as reader,
    ):
        list(reader)
