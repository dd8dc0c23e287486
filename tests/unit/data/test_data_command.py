"""``torchtitan-diloco data``."""

from pathlib import Path

import pytest

from torchtitan_diloco.cli import dispatch
from torchtitan_diloco.data.prepare import load_manifest


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
