"""One start of an island at a time: who is refused, who takes over, and who notices."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.lease import LEASE, Held, Lease

NEVER = 60.0


def never(reason: str) -> None:
    raise AssertionError(reason)


def lease(folder: Path, name: str, lost: Callable[[str], None] = never, stale_s: float = NEVER) -> Lease:
    return Lease(folder, 3, name, lost, beat_s=0.05, stale_s=stale_s)


def holder(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / LEASE).read_bytes()))


def elsewhere(folder: Path, **changes: object) -> None:
    """The last thing that a start on another machine wrote."""
    with_job = {
        "incarnation": "theirs",
        "host": "node7",
        "pid": 41,
        "place": "another machine",
        "born": "1",
        "folder": "1:1",
    }
    whole = {**with_job, "job": "815", "since": 1.7e9, "beats": 0, **changes}
    unfinished = folder / f"{LEASE}.theirs"
    unfinished.write_text(json.dumps(whole))
    unfinished.replace(folder / LEASE)


def test_a_lease_that_is_given_back_leaves_nothing_and_the_next_start_takes_it_at_once(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        mine = lease(tmp_path / "island-3", name)
        mine.take(never)
        assert holder(tmp_path / "island-3")["incarnation"] == name
        mine.release()
        mine.release()
        assert list((tmp_path / "island-3").iterdir()) == []


def test_fr41_a_second_copy_on_this_machine_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = lease(tmp_path, "first")
    first.take(never)
    sentence = (
        r"^island\.id: island 3 in \S+ is held by process \d+ on \S+, Slurm job 77, since 20\S+ \S+ UTC; stop"
    )
    with pytest.raises(Held, match=sentence):
        lease(tmp_path, "second").take(never)
    assert holder(tmp_path)["incarnation"] == "first" and len(list(tmp_path.iterdir())) == 1
    first.release()


def test_fr41_a_second_copy_on_another_machine_is_refused_as_soon_as_the_first_shows_life(
    tmp_path: Path,
) -> None:
    elsewhere(tmp_path)
    said: list[str] = []
    threading.Timer(0.3, lambda: elsewhere(tmp_path, beats=1)).start()
    with pytest.raises(Held, match=r"process 41 on node7, Slurm job 815, since 2023-11-14 22:13:20 UTC"):
        lease(tmp_path, "mine", stale_s=20.0).take(said.append)
    assert len(said) == 1 and "waiting at most 20 s" in said[0] and "node7" in said[0]
    assert holder(tmp_path)["incarnation"] == "theirs"


@pytest.mark.parametrize("damaged", [False, True])
def test_fr41_a_lease_without_life_is_taken_over(tmp_path: Path, damaged: bool) -> None:
    elsewhere(tmp_path)
    if damaged:
        (tmp_path / LEASE).write_text('{"incarnation": "th')
    said: list[str] = []
    mine = lease(tmp_path, "mine", stale_s=0.3)
    began = time.monotonic()
    mine.take(said.append)
    assert time.monotonic() - began >= 0.3 and len(said) == 1
    assert holder(tmp_path)["incarnation"] == "mine"
    mine.release()


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = lease(tmp_path, "mine")
    mine.take(never)
    mine.release()
    assert child.stdin is not None
    born = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    theirs = {**asdict(mine._mine), "incarnation": "theirs", "pid": child.pid, "born": born}
    (tmp_path / LEASE).write_text(json.dumps(theirs))
    with pytest.raises(Held):
        lease(tmp_path, "second").take(never)
    child.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)
    last = lease(tmp_path, "third")
    last.take(never)
    last.release()
    child.wait()
    child.stdin.close()


def test_the_copy_of_a_folder_is_held_by_nobody(tmp_path: Path) -> None:
    mine = lease(tmp_path / "a", "mine")
    mine.take(never)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = lease(tmp_path / "b", "copy")
    copy.take(never)
    copy.release()
    mine.release()


def test_a_lease_that_cannot_be_read_for_a_moment_is_not_lost(tmp_path: Path) -> None:
    lost: list[str] = []
    mine = lease(tmp_path, "mine", lost.append)
    mine.take(never)
    kept = (tmp_path / LEASE).read_bytes()
    (tmp_path / LEASE).rename(tmp_path / "kept")
    (tmp_path / LEASE).mkdir()  # reading it fails
    time.sleep(0.3)
    (tmp_path / LEASE).rmdir()
    (tmp_path / LEASE).write_bytes(kept)
    time.sleep(0.3)
    assert lost == []
    (tmp_path / "kept").unlink()
    mine.release()


def test_a_folder_that_cannot_be_written_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"^job\.dump_folder: cannot write \S+: not a directory; free some space or set"
    ):
        lease(tmp_path / "file" / "island-3", "mine").take(never)


@pytest.mark.parametrize("reused", [False, True], ids=["dead", "its pid is another's"])
def test_fr41_after_a_crash_on_this_machine_nobody_waits(tmp_path: Path, reused: bool) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchtitan_diloco.island.lease import Lease\n"
        "Lease(Path(sys.argv[1]), 3, 'crashed', print).take(print); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=30)
    left = holder(tmp_path)
    assert left["incarnation"] == "crashed" and left["born"]
    if reused:
        (tmp_path / LEASE).write_text(json.dumps({**left, "pid": 1}))
    mine = lease(tmp_path, "mine")
    mine.take(never)
    assert holder(tmp_path)["incarnation"] == "mine"
    mine.release()


def test_the_holder_shows_life_and_ends_when_it_was_taken_over(tmp_path: Path) -> None:
    """As after a freeze: it has to stop before it writes into a folder that is another's now."""
    lost: list[str] = []
    over = threading.Event()
    mine = lease(tmp_path, "mine", lambda reason: (lost.append(reason), over.set())[0])  # type: ignore[func-returns-value]
    mine.take(never)
    end = time.monotonic() + 10
    while int(str(holder(tmp_path)["beats"])) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    elsewhere(tmp_path)
    assert over.wait(10)
    mine.release()
    time.sleep(0.2)
    assert holder(tmp_path)["incarnation"] == "theirs"
    assert len(lost) == 1 and "was taken over by process 41 on node7, Slurm job 815" in lost[0]


def test_a_folder_that_is_taken_away_gets_its_lease_back(tmp_path: Path) -> None:
    mine = lease(tmp_path, "mine")
    mine.take(never)
    (tmp_path / LEASE).unlink()
    end = time.monotonic() + 10
    while not (tmp_path / LEASE).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    mine.release()
