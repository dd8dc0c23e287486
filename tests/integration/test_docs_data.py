"""Every command and every configuration of docs/data.md, as written, in the order of the page."""

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.megatron import some_documents, write_megatron
from tests.helpers.schedules import Schedule, source
from torchtitan_diloco.cli import data, validate
from torchtitan_diloco.cli.run import island_ranks
from torchtitan_diloco.config.load import load_config

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page takes for granted: the user's own files, and a run that has been done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("notes.txt").write_text("A note.\nOf two lines.\n\n" * 400)
    Path("news.jsonl").write_text('{"body": "Something happened today."}\n' * 400)
    Path("data").mkdir()
    write_megatron(Path("data/web_text_document"), some_documents())
    islands = Schedule(
        tmp_path / "outputs" / "mixture", [[source("a", 60, shards=7)]] * 2, seed=2, slots=3, calm=True
    )
    islands.run()
    islands.close()
    return tmp_path


def test_the_page_does_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = []
    for language, block in BLOCKS:
        if language == "toml":
            Path(re.match(r"# (\w+\.toml)\n", block)[1]).write_text(block)  # type: ignore[index]
            continue
        assert language == "bash"
        for line in block.splitlines():
            program, command, *arguments = shlex.split(line)
            assert program == "torchtitan-diloco"
            capsys.readouterr()
            if command == "run":  # takes long, and has tests of its own
                file, *options = arguments
                given = dict(zip(options[::2], options[1::2], strict=True))
                assert given.keys() == {"--islands", "--ranks"}
                config = load_config(file, ["--semi_sync.num_islands", given["--islands"]]).config
                assert island_ranks(given["--ranks"], config) == {0: 1, 1: 1}
            else:
                assert {"data": data.main, "validate": validate.main}[command](arguments) == 0, line
                shown = capsys.readouterr()
                assert "warning" not in shown.out and shown.err == "", line
            done.append((command, arguments[0]))
    assert {what for command, what in done if command == "data"} == {"prepare", "inspect", "verify", "audit"}
    assert "run" in dict(done)
    assert load_config("islands.toml").config.data.shared is False


def test_the_audit_prints_the_columns_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main(["audit", "outputs/mixture"]) == 0
    shown = capsys.readouterr().out
    table = PAGE.read_text().partition("| Column | Samples |")[2].partition("\n\n")[0]
    columns = re.findall(r"^\| ([a-z ]+) \|", table, flags=re.MULTILINE)
    assert len(columns) == 6
    assert all(column in shown for column in columns)
