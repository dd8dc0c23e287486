"""The hub's folder: what was written comes back, damage is named, and only one hub goes on with it."""

from pathlib import Path

import pytest

from tests.helpers.hub_words import a_hub, a_run, commit
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.hub import Hub
from torchtitan_diloco.hub.slot import Record
from torchtitan_diloco.hub.store import Fenced, FileStore, Snapshot


def a_stored_run(folder: Path, slots: int = 5, every: int = 1) -> Hub:
    """The folder as a hub leaves it that has ended in good order."""
    hub = a_hub(store=FileStore(folder, every))
    talkers = a_run(hub)
    for slot in range(slots):
        commit(hub, talkers, slot)
    hub.store.close()
    return hub


def loaded(folder: Path) -> Hub:
    store = FileStore(folder)
    try:
        return a_hub(store=store)
    finally:
        store.close()


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    before, after = a_stored_run(tmp_path), loaded(tmp_path)
    assert before.state is not None and after.state is not None
    assert after.state.describe() == before.state.describe()
    for name, tensor in before.state.tensors().items():
        assert after.state.tensors()[name].equal(tensor)
    assert after.records == before.records
    assert after.terms == before.terms
    assert after.store.epoch > before.store.epoch


def test_what_the_hubs_encoding_has_lost_survives_a_restart(tmp_path: Path) -> None:
    codec = {"semi_sync.codec.wire": "int8", "semi_sync.codec.error_feedback": True}

    def run(folder: Path, restart: bool) -> list[str]:
        hub = a_hub(store=FileStore(folder))
        talkers = a_run(hub, **codec)
        for slot in range(8):
            if restart and slot == 5:
                hub.store.close()
                hub = a_hub(store=FileStore(folder))
                for talker in talkers:
                    talker.hub = hub
                    talker.enter(**codec)
            commit(hub, talkers, slot)
        hub.store.close()
        assert hub.state is not None
        return [state.digest for state in hub.state.states]

    assert run(tmp_path / "restarted", True) == run(tmp_path / "not", False)


def test_an_empty_folder_is_a_hub_that_nobody_has_come_to(tmp_path: Path) -> None:
    assert loaded(tmp_path / "new" / "folder").state is None


def test_only_the_files_of_the_last_save_are_kept(tmp_path: Path) -> None:
    a_stored_run(tmp_path, slots=7)
    names = sorted(path.name.partition("-v")[0] for path in (tmp_path / "parts").iterdir())
    assert names == ["anchor.0", "anchor.1", "momentum.0", "momentum.1"]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    elif how == "emptied":
        content.clear()
    else:
        content[int(float(how) * (len(content) - 1))] ^= 0x01
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "emptied", "0", "0.3", "0.7", "1"])
@pytest.mark.parametrize("name", ["state.json", "anchor.0", "momentum.1"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, how: str) -> None:
    a_stored_run(tmp_path)
    (path,) = [p for p in tmp_path.rglob("*") if p.is_file() and p.name.startswith(name)]
    damage(path, how)
    with pytest.raises(UserError, match=path.name):
        loaded(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    a_stored_run(tmp_path)
    path = next((tmp_path / "parts").iterdir())
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        loaded(tmp_path)


@pytest.mark.parametrize("how", ["0", "0.3", "0.7"])
def test_a_damaged_line_of_the_journal_is_named(tmp_path: Path, how: str) -> None:
    a_stored_run(tmp_path)
    damage(tmp_path / "journal.jsonl", how)
    with pytest.raises(UserError, match=r"journal\.jsonl is damaged in line \d"):
        loaded(tmp_path)


@pytest.mark.parametrize("how", ["truncated", "emptied", "0", "0.3", "0.7", "1"])
def test_a_damaged_epoch_is_named_or_leads_to_a_later_one(tmp_path: Path, how: str) -> None:
    epoch = a_stored_run(tmp_path).store.epoch
    damage(tmp_path / "epoch", how)
    try:
        later = loaded(tmp_path).store.epoch
    except UserError as error:
        if "epoch is damaged; remove it" not in str(error):
            raise
        (tmp_path / "epoch").unlink()
        later = loaded(tmp_path).store.epoch
    assert later >= epoch


def test_a_torn_last_line_of_the_journal_is_removed_and_the_next_one_is_whole(tmp_path: Path) -> None:
    """A hub that is killed while it writes a line has told nobody of its slot; the line after it must not be lost."""
    a_stored_run(tmp_path, slots=4, every=100)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])
    store = FileStore(tmp_path)
    hub = a_hub(store=store)
    assert sorted(hub.records) == [0, 1, 2]
    store.commit(Record(3, "failed", (0, 1), reason="a test"), [0, 1])
    store.close()
    assert loaded(tmp_path).records[3].reason == "a test"
    assert len(journal.read_bytes().splitlines()) == 4


def test_a_second_hub_on_the_folder_fences_the_first(tmp_path: Path) -> None:
    """FR-42: no folder has two writers."""
    first = FileStore(tmp_path)
    hub = a_hub(store=first)
    talkers = a_run(hub)
    commit(hub, talkers, 0)
    second = FileStore(tmp_path)
    assert second.epoch > first.epoch
    with pytest.raises(Fenced, match=f"another hub, number {second.epoch}, was started on"):
        first.commit(Record(1, "failed", (0,)), [0])
    assert hub.terms is not None and hub.state is not None
    with pytest.raises(Fenced):
        first.save(Snapshot(hub.terms, hub.state))
    second.commit(Record(1, "failed", (0,)), [0])
    first.close()
    second.close()


def test_a_hub_that_was_fenced_while_it_wrote_tells_nobody_of_the_slot(tmp_path: Path) -> None:
    """The other one may have read the journal without that line."""
    store = FileStore(tmp_path)
    hub = a_hub(store=store)
    talkers = a_run(hub)
    for talker in talkers:
        talker.say(0)
        talker.send(0)
    job = hub.take_job()
    assert job is not None
    job.run()
    other = FileStore(tmp_path)
    with pytest.raises(Fenced):
        hub.done(job)
    assert talkers[0].outcome(0)["status"] == "open"
    store.close()
    other.close()


def test_islands_that_know_a_hub_take_one_with_a_new_folder(tmp_path: Path) -> None:
    """A damaged folder may be moved away: the new hub's epoch is not below that of the old one."""
    old = FileStore(tmp_path / "old")
    new = FileStore(tmp_path / "new")
    assert new.epoch >= old.epoch
    old.close()
    new.close()
