"""``torchtitan-diloco data``."""

import json
import os
import signal
from pathlib import Path

import pytest

from torchtitan_diloco.cli import dispatch
from torchtitan_diloco.data import writer
from torchtitan_diloco.data.prepare import load_manifest, prepare


def prepare_command(text: Path, tokenizer: Path, output: Path) -> list[str]:
    words = ["--input", text, "--tokenizer", tokenizer, "--seq-len", 16, "--output", output]
    return ["data", "prepare", *map(str, words)]


def test_prepare_verify_and_inspect(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"body": "w8 w9"}\n')
    output = tmp_path / "data" / "corpus"
    arguments = ["--input", str(text_file), str(more), "--tokenizer", str(tokenizer_dir), "--seq-len", "16"]
    assert dispatch(["data", "prepare", *arguments, "--output", str(output), "--text-key", "body"]) == 0
    manifest = load_manifest(output)
    assert manifest.counts.documents == 301
    shown = capsys.readouterr().out
    assert manifest.digest in shown and "301" in shown

    assert dispatch(["data", "inspect", str(output)]) == 0
    assert capsys.readouterr().out == shown
    assert dispatch(["data", "verify", str(output)]) == 0
    assert manifest.digest in capsys.readouterr().out

    (output / "state.json").write_text("{}")
    assert dispatch(["data", "verify", str(output)]) == 2
    assert "state.json has 2 bytes" in capsys.readouterr().err


def test_messages_name_the_flags_and_the_exit_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--seq-len", "8", "--output", str(tmp_path / "out")]
    assert dispatch(["data", "prepare", "--input", "absent", "--tokenizer", "bundled:bpe2048", *common]) == 2
    assert capsys.readouterr().err.startswith("error: --input: cannot read absent")
    assert dispatch(["data", "prepare", "--input", "bundled:kjv", "--tokenizer", str(tmp_path), *common]) == 2
    assert capsys.readouterr().err.startswith("error: --tokenizer: no tokenizer.json")
    assert dispatch(["data", "inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: DIR: no prepared corpus at")
    with pytest.raises(SystemExit) as stop:
        dispatch(["data", "prepare", "--input", "x"])
    assert stop.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_existing_corpus_that_was_cut_off_is_not_taken_for_whole(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corpus"
    command = prepare_command(text_file, tokenizer_dir, output)
    assert dispatch(command) == 0
    whole = (output / "data-00000.arrow").read_bytes()
    (output / "data-00000.arrow").write_bytes(whole[:100])
    capsys.readouterr()
    assert dispatch(command) == 2
    shown = capsys.readouterr()
    assert "has 100 bytes instead of" in shown.err and "is damaged; remove it" in shown.err and not shown.out
    (output / "data-00000.arrow").write_bytes(whole)
    for jobs in ("0", "-3"):
        assert dispatch([*command, "--jobs", jobs]) == 2
        assert f"--jobs: must be at least 1, not {jobs}" in capsys.readouterr().err


def test_verify_notices_files_that_the_manifest_lacks(
    text_file: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1 << 10)
    output = tmp_path / "corpus"
    prepare([text_file], tokenizer_dir, 16, output)
    manifest = json.loads((output / "manifest.json").read_text())
    for files, message in (
        ([], "files names no data files"),
        (manifest["files"][1:], "sequences, its manifest says"),
        ([{"name": 5, "bytes": 1, "sha256": ""}], "files[0].name is a number instead of text"),
    ):
        (output / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        assert dispatch(["data", "verify", str(output)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_preparation_with_a_word_and_nothing_left(
    text_file: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add = writer.CorpusWriter.add
    monkeypatch.setattr(writer.CorpusWriter, "add", lambda *a: (os.kill(os.getpid(), number), add(*a)))
    (tmp_path / "out").mkdir()
    command = prepare_command(text_file, tokenizer_dir, tmp_path / "out" / "corpus")
    before = signal.getsignal(signal.SIGTERM)
    # Shells start what runs in the background with SIGINT ignored, the test runner perhaps as well.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert dispatch(command) == 130
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert capsys.readouterr().err == "interrupted\n"
    assert not os.listdir(tmp_path / "out") and signal.getsignal(signal.SIGTERM) is before
