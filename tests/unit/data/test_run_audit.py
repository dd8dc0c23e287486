"""``data audit`` on folders that are no runs, and on ledgers that were edited."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.cli import dispatch
from torchtitan_diloco.data.ledger import LEDGER, READING, Ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one island, one source of four samples in two shards, one committed slot."""
    ledger = Ledger(tmp_path / "run" / "island-0", 0, clock=lambda: 0.0)
    ledger.begin({"seed": 0, "sources": {"a": {"path": "p", "samples": 4, "shards": 2}}}, {"a": "0-1"})
    ledger.head("", 0, 0, {})
    ledger.commit(
        slot=0,
        parent="",
        lineage="x",
        tokens_total=8,
        consumed={0: {"a/0": (0, 1)}},
        skipped={},
        members={0: {"a": "0-1"}},
    )
    ledger.read({"a/1": (0, 1)})
    ledger.close()
    return tmp_path / "run"


def edit(run: Path, line: int, *keys: str, value: Any = None) -> None:
    """Sets, or removes, the value under ``keys`` in a line of the ledger."""
    path = run / "island-0" / LEDGER
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    inner = entries[line]
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def never_joined(folder: Path) -> Path:
    """A run whose island was started, and has not entered it."""
    ledger = Ledger(folder / "island-0", 0, clock=lambda: 0.0)
    ledger.begin({"seed": 0, "sources": {"a": {"path": "p", "samples": 4, "shards": 2}}}, {"a": "0-1"})
    ledger.close()
    return folder


def test_a_run_that_nobody_has_entered_yet_is_not_called_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["data", "audit", str(never_joined(tmp_path / "run"))]) == 0
    assert capsys.readouterr().out == "no island has entered the run yet: there is nothing to audit\n"


def test_nor_is_it_taken_for_one_where_lines_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = never_joined(tmp_path / "run")
    with (run / "island-0" / LEDGER).open("a") as file:
        file.write("{damaged\n")
    assert dispatch(["data", "audit", str(run)]) == 1
    out = capsys.readouterr().out
    assert "1 lines cannot be read" in out and "the account is broken" in out


def test_a_whole_ledger_is_accounted_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["data", "audit", str(run), str(run / ".." / "run")]) == 0  # twice the same counts once
    assert "every sample was consumed at most once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "keys", "value"),
    [
        (0, ("sources",), None),
        (0, ("sources", "a", "samples"), "4"),
        (0, ("sources", "a", "shards"), 0),
        (0, ("holds", "a"), "x-y"),
        (1, ("positions",), []),
        (1, ("t",), None),
        (2, ("skipped",), None),
        (2, ("lineage",), None),
        (2, ("consumed", "0", "a/0"), [0]),
        (2, ("consumed", "0", "nonsense"), [0, 1]),
        (2, ("consumed", "x"), {}),
        (2, ("members", "0"), 5),
    ],
)
def test_an_edited_line_is_left_out_and_said_so(
    run: Path, capsys: pytest.CaptureFixture[str], line: int, keys: tuple[str, ...], value: object
) -> None:
    edit(run, line, *keys, value=value)
    assert dispatch(["data", "audit", str(run)]) in (0, 1)
    assert "1 lines cannot be read and are left out" in capsys.readouterr().out


def test_more_shards_than_samples_is_no_defect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run, 0, "sources", "a", "samples", value=1)
    (run / "island-0" / READING).unlink()
    assert dispatch(["data", "audit", str(run)]) == 0
    edit(run, 0, "sources", "a", "samples", value=0)
    assert dispatch(["data", "audit", str(run)]) == 1
    assert "stream a/0: was read up to 1, but has no samples" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused_beside_one_that_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "empty").mkdir()
    (run / "island-0.old").mkdir()
    (run / "island-0.old" / LEDGER).write_text("")
    assert dispatch(["data", "audit", str(run)]) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(run), str(run.parent / "nope")], "nope is no folder; give the folder of a run"),
        ([str(run), str(run.parent / "empty")], "empty has no island-*/ledger.jsonl; give"),
        ([], "RUN: no folder given; give that of a run"),
    ):
        assert dispatch(["data", "audit", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_folders_of_two_runs_are_refused_and_copies_of_one_are_not(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, run.parent / "other")
    (run / "run.json").write_text('{"run_id": "first"}')
    (other / "run.json").write_text('{"run_id": "second"}')
    for folders in ((run, other), (other, run)):
        assert dispatch(["data", "audit", *map(str, folders)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: RUN: ") and error.count("\n") == 1
        assert f"{run} is of run first" in error or f"{run} of run first" in error
        assert f"{other} is of run second" in error or f"{other} of run second" in error
    for text in ('{"run_id": "first"}', "[]"):  # a copy, a damaged one, none at all
        (other / "run.json").write_text(text)
        assert dispatch(["data", "audit", str(run), str(other)]) == 0
    (other / "run.json").unlink()
    assert dispatch(["data", "audit", str(run), str(other)]) == 0
