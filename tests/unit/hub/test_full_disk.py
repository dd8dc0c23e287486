"""A hub whose disk is full ends with one sentence that names the folder and the remedy, and says what is not saved."""

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland
from tests.helpers.hub_words import a_hub, a_run, commit
from torchtitan_diloco.cli.local import server as local
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.slot import Record
from torchtitan_diloco.hub.store import FileStore

SENTENCE = r"^syncer\.dir: cannot write .*: the disk is full; free some space or set syncer\.dir to a writable folder$"


def fill(store: FileStore) -> None:
    """No line of the journal goes onto the disk any more, now or when it is closed."""
    store._journal.close()
    store._journal = open("/dev/full", "ab")  # noqa: SIM115 - the store closes it


def full(*arguments: Any) -> dict[str, Any]:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_slot_that_cannot_be_written_down_is_told_in_one_sentence_and_so_is_the_end(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    fill(store)
    with pytest.raises(UserError, match=SENTENCE):
        store.commit(Record(0, "failed", (0,)), [0])
    store.close()


def test_a_hub_that_cannot_write_ends_with_that_sentence(tmp_path: Path) -> None:
    server = HubServer("127.0.0.1", 0, RUN, Rules(), tmp_path)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:  # noqa: BLE001 - compared below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    island = HubIsland(0, [server.url], islands=1)
    island.join()
    assert isinstance(server.store, FileStore)
    fill(server.store)
    island.offer(0)
    thread.join(30)
    island.transport._left.set()
    (error,) = raised
    assert isinstance(error, UserError) and "the disk is full; free some space" in str(error)


def test_a_last_state_that_cannot_be_saved_is_no_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path)
    hub = a_hub(store=store)
    talkers = a_run(hub)
    commit(hub, talkers, 0)
    monkeypatch.setattr(store._parts, "write", full)
    commit(hub, talkers, 1)
    with pytest.raises(UserError, match=SENTENCE):
        store.close()
    assert "the state of slot 2 is not saved: syncer.dir: cannot write" in caplog.text


def test_a_state_that_could_not_be_saved_is_forgotten_once_a_later_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    hub = a_hub(store=store)
    talkers = a_run(hub)
    failed, write = threading.Event(), store._parts.write

    def once(file: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        if failed.is_set():
            return write(file, name, tensor)
        failed.set()
        return full()

    monkeypatch.setattr(store._parts, "write", once)
    commit(hub, talkers, 0)
    assert failed.wait(10)
    commit(hub, talkers, 1)
    store.close()


@pytest.mark.parametrize("code, said", [(0, False), (2, True), (None, True)])
def test_run_says_so_when_its_hub_ends_without_having_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, said: bool
) -> None:
    monkeypatch.setattr(local, "STOP_WAIT_S", 0.1)
    monkeypatch.setattr(local.os, "kill", lambda pid, number: codes.insert(0, code))
    codes: list[int | None] = [None]
    hub = object.__new__(local.LocalServer)
    hub._folder, hub._kind = tmp_path, local.hub(tmp_path)
    hub._now = local.time.monotonic
    hub._child = SimpleNamespace(  # type: ignore[assignment]
        pid=0, poll=lambda: codes[0], kill_tree=lambda: None, log=tmp_path / "hub.log",
        log_tail=lambda lines: "error: syncer.dir: cannot write",
    )  # fmt: skip
    words = hub.stop()
    assert bool(words) == said
    if words:
        assert "its last state may not be saved" in words and "error: syncer.dir: cannot write" in words
