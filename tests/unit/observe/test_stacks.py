"""FR-66: what an island is doing can be seen without a debugger."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_diloco.observe.stacks import StackWriter


@pytest.fixture
def blocked() -> Iterator[None]:
    """A thread that waits."""
    release = threading.Event()

    def waits_for_a_peer() -> None:
        release.wait()

    thread = threading.Thread(target=waits_for_a_peer, name="bulk")
    thread.start()
    yield
    release.set()
    thread.join()


def touch(folder: Path, at: int) -> None:
    (folder / "dump").touch()
    os.utime(folder / "dump", (at, at))


@pytest.mark.usefixtures("blocked")
def test_fr_66_touching_dump_writes_the_stacks_of_all_threads_of_each_rank(tmp_path: Path) -> None:
    ranks = [StackWriter(tmp_path, rank) for rank in range(2)]
    assert not any(rank.look() for rank in ranks)
    touch(tmp_path, 1000)
    for number, rank in enumerate(ranks):
        assert rank.look()
        assert not rank.look()
        said = (tmp_path / "logs" / f"stacks-rank-{number}.txt").read_text()
        waiting, training = said.partition("thread bulk:")[2], said.partition("thread MainThread:")[2]
        assert "waits_for_a_peer" in waiting.partition("thread ")[0]
        assert "test_fr_66_touching_dump" in training.partition("thread ")[0]
        assert f"process {os.getpid()}" in said
    touch(tmp_path, 900)  # by another machine, whose clock is behind
    assert ranks[0].look()
    (tmp_path / "dump").unlink()
    assert not ranks[0].look()
    assert (tmp_path / "logs" / "stacks-rank-0.txt").read_text().count("====") == 2


def test_fr_66_what_was_asked_before_this_start_is_not_answered(tmp_path: Path) -> None:
    touch(tmp_path, 1000)
    writer = StackWriter(tmp_path, 0)
    assert not writer.look()
    touch(tmp_path, 1001)
    assert writer.look()


def test_fr_66_a_full_disk_does_not_end_the_looking(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way of the folder")
    writer = StackWriter(tmp_path, 0, look_s=0.01)
    writer.start()
    touch(tmp_path, 1000)
    time.sleep(0.2)
    (tmp_path / "logs").unlink()
    touch(tmp_path, 1001)
    deadline = time.monotonic() + 10
    while not (tmp_path / "logs" / "stacks-rank-0.txt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
