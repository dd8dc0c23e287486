"""The run folder: writable or refused in one sentence, locked, never half-written, moved aside whole."""

import errno
import json
import os
from pathlib import Path

import pytest

from torchtitan_diloco.cli.local import folder as folder_module
from torchtitan_diloco.cli.local.earlier import Plan, decide, require_same_data
from torchtitan_diloco.cli.local.folder import DataIdentity, RunFolder, run_record, write_atomically
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.errors import UserError


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Let fsync fail with ENOSPC after a number of calls that work."""
    calls = iter(range(1_000))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(folder_module.os, "fsync", fsync)


def test_a_dump_folder_that_cannot_be_made_is_refused_naming_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^job\.dump_folder: cannot write .*file/out/run: not a directory"):
        RunFolder(tmp_path / "file" / "out" / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch)
    with pytest.raises(UserError, match=r"^job\.dump_folder: cannot write .*: the disk is full"):
        RunFolder(tmp_path / "outputs" / "run")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_between_the_two_files_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "outputs" / "run")
    fill_the_disk(monkeypatch, after=1)
    with pytest.raises(UserError, match="the disk is full"):
        folder.write("a = 1\n", {"run_id": "x"})
    assert not list(tmp_path.iterdir())


def test_a_failed_rewrite_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "config.toml", "old")
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "config.toml", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "old"


def test_giving_up_removes_only_what_it_made_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "outputs" / "run")
    (tmp_path / "outputs" / "corpus").mkdir()
    folder.abandon()
    assert [p.name for p in (tmp_path / "outputs").iterdir()] == ["corpus"]


def test_the_lock_is_refused_naming_its_holder_and_free_again_after_close(tmp_path: Path) -> None:
    held = RunFolder(tmp_path / "run")
    with pytest.raises(
        UserError, match=rf"is in use by another `run` \(pid {os.getpid()} on .* since \d{{4}}-"
    ):
        RunFolder(tmp_path / "run")
    held.close()
    RunFolder(tmp_path / "run").close()


def test_moved_aside_the_folder_is_whole_and_the_new_one_is_locked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", now=lambda: 0.0)
    folder.write("a = 1\n", {"run_id": "x"})
    names = [folder.move_aside().name]
    folder.write("a = 2\n", {"run_id": "y"})
    names.append(folder.move_aside().name)
    assert names[1] == f"{names[0]}-2", "two within a second"
    assert {p.name for p in (tmp_path / names[0]).iterdir()} == {"config.toml", "run.json"}
    assert folder.is_empty()
    with pytest.raises(UserError, match="in use"):
        RunFolder(tmp_path / "run")


def test_islands_without_a_readable_record_are_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.earlier() is None
    (tmp_path / "run" / "island-0").mkdir()
    with pytest.raises(UserError, match=r"no readable run\.json.*--fresh"):
        folder.earlier()


def test_a_continued_run_keeps_its_id_and_a_new_one_gets_its_own(tmp_path: Path) -> None:
    def record(earlier: folder_module.Earlier | None) -> dict[str, object]:
        return run_record(name="n", config_text="", data=DataIdentity(), ranks=[1], earlier=earlier, now=0.0)

    folder = RunFolder(tmp_path / "run")
    first = record(None)
    folder.write("", first)
    earlier = folder.earlier()
    again = record(earlier)
    assert again["run_id"] == first["run_id"] and again["created"] == "1970-01-01T00:00:00Z"
    assert record(None)["run_id"] != first["run_id"]


def test_a_run_is_not_continued_on_another_corpus(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    began_with = DataIdentity(manifests=["a" * 64], tokenizer="t")
    folder.write("", run_record(name="n", config_text="", data=began_with, ranks=[1], earlier=None, now=0.0))
    earlier = folder.earlier()
    assert earlier is not None
    require_same_data(earlier, began_with)
    with pytest.raises(UserError, match=r"^data\.sources: .*aaaaaaaaaa, now none.*--fresh"):
        require_same_data(earlier, DataIdentity())


def test_of_a_run_that_never_trained_only_its_own_files_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write("a = 1\n", {"run_id": "x"})
    for name in ("island-0/logs/a.log", "lighthouse.log", "notes.txt"):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).touch()
    folder.clear()
    assert {path.name for path in folder.path.iterdir()} == {".lock", "notes.txt"}


def test_a_checkpoint_or_a_step_is_training(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write(
        "", run_record(name="n", config_text="", data=DataIdentity(), ranks=[1], earlier=None, now=0.0)
    )

    def begun() -> bool:
        earlier = folder.earlier()
        assert earlier is not None
        return earlier.begun

    island = tmp_path / "run" / "island-0"
    (island / "checkpoint").mkdir(parents=True)
    assert not begun()
    (island / "saves" / "step-5").mkdir(parents=True)
    assert begun()
    (island / "saves" / "step-5").rmdir()
    (island / "events.jsonl").write_text('{"t": 1, "event": "inner", "step": 1, "incarnation": "i"}\n')
    assert begun()


@pytest.mark.parametrize(
    ("states", "islands", "steps", "answer"),
    [
        (("done", "done"), 3, 10, Plan.ASIDE),
        (("done", "done"), 1, 10, Plan.ASIDE),
        (("done", "done"), 2, 20, Plan.CONTINUE),
        (("done", "done"), 1, 20, "holds a finished run with other settings"),
        (("done", "resume"), 1, 10, "holds an unfinished run with other settings"),
        (("done", "resume"), 3, 20, "holds an unfinished run with other settings"),
    ],
)
def test_whether_a_run_is_finished_is_told_by_its_own_number_of_islands(
    tmp_path: Path, states: tuple[str, ...], islands: int, steps: int, answer: Plan | str
) -> None:
    def config(number: int, steps: int) -> str:
        return (
            f"[model]\nname = 'llama3'\nflavor = 'debugmodel'\n[training]\nsteps = {steps}\n"
            f"[semi_sync]\nnum_islands = {number}\n"
        )

    folder = RunFolder(tmp_path / "run")
    record = run_record(name="n", config_text="", data=DataIdentity(), ranks=[1], earlier=None, now=0.0)
    folder.write(config(2, 10), record)
    for island, state in enumerate(states):
        (folder.path / f"island-{island}" / "saves" / "step-5").mkdir(parents=True)
        (folder.path / f"island-{island}" / "state.json").write_text(json.dumps({"state": state}))
    (tmp_path / "now.toml").write_text(config(islands, steps))
    asked = load_config(tmp_path / "now.toml").config
    if isinstance(answer, Plan):
        assert decide(folder, asked, fresh=False).plan is answer
    else:
        with pytest.raises(UserError, match=rf"{answer} \(semi_sync.num_islands was 2, is {islands}"):
            decide(folder, asked, fresh=False)
