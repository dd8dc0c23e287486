"""The hub's folder: what was written comes back, damage is named, and only one hub goes on with it."""

from pathlib import Path

import pytest

from tests.helpers.hub_words import Talker, a_hub, a_run, commit
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


def test_a_hub_that_ends_in_good_order_saves_all_that_it_holds(tmp_path: Path) -> None:
    """Whatever ``syncer.save_every``; else the islands would have to bring it back."""
    hub = a_hub(store=FileStore(tmp_path, every=100))
    hub.finish()  # nobody has come yet
    talkers = a_run(hub)
    for slot in range(5):
        commit(hub, talkers, slot)
    hub.finish()
    hub.store.close()
    after = loaded(tmp_path)
    assert hub.state is not None and after.state is not None
    assert after.state.describe() == hub.state.describe()
    for name, tensor in hub.state.tensors().items():
        assert after.state.tensors()[name].equal(tensor)


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_journal_that_ends_at_a_line_before_the_manifest_is_noticed(tmp_path: Path, kept: int) -> None:
    a_stored_run(tmp_path, slots=5)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(
        UserError, match=rf"knows of 5 lines of journal\.jsonl, whose end is missing \({kept}\)"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_line_that_is_missing_before_others_is_noticed(tmp_path: Path, gone: int) -> None:
    a_stored_run(tmp_path, slots=5, every=100)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(UserError, match=rf"damaged in line {gone + 1}: lines before it are missing"):
        loaded(tmp_path)


def test_a_line_that_a_fenced_hub_has_left_is_no_damage(tmp_path: Path) -> None:
    a_stored_run(tmp_path, slots=1)
    first = FileStore(tmp_path)
    second = FileStore(tmp_path)
    mine, first._mine = first._mine, (tmp_path / "epoch").read_text()
    with pytest.raises(Fenced):
        _commit_fenced(first, mine)
    second.commit(Record(1, "failed", (0,), reason="of the second"), [0])
    for store in (first, second):
        store.close()
    assert loaded(tmp_path).records[1].reason == "of the second"
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) == 3


def _commit_fenced(store: FileStore, mine: str) -> None:
    """As if the other hub had been started between the two looks at the epoch, so that the line is there already."""
    looks, look = iter([store._mine, mine]), store._check_epoch

    def check() -> None:
        store._mine = next(looks)
        look()

    store._check_epoch = check  # type: ignore[method-assign]
    store.commit(Record(1, "failed", (0,), reason="of the first"), [0])


def test_lines_lost_behind_the_manifest_are_brought_back_by_the_island_that_holds_them(
    tmp_path: Path,
) -> None:
    """Such a journal is that of a hub that was killed before; whoever holds more makes it the run's when it joins."""
    hub = a_hub(store=FileStore(tmp_path, every=100))
    talkers = a_run(hub)
    for slot in range(3):
        commit(hub, talkers, slot)
    hub.store.close()
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    again = a_hub(store=FileStore(tmp_path))
    assert sorted(again.records) == [0, 1]
    for talker in talkers:
        talker.hub = again
    for act in (Talker.join, Talker.enter):
        for talker in talkers:
            act(talker)
    assert again.state is not None and again.state.describe() == talkers[0].state.describe()
    assert again.state.slot == 3
    commit(again, talkers, 3)
    again.store.close()
