"""The hub's folder belongs to one run: another run's state is moved aside or refused by name, never gone on from."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.hub_words import a_hub, a_run, commit
from torchtitan_diloco.cli.hub_folder import claim, owner_of, set_aside
from torchtitan_diloco.cli.local import launch
from torchtitan_diloco.cli.local.earlier import Decision, Plan
from torchtitan_diloco.cli.local.folder import DataIdentity, RunFolder
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.store import FileStore


def leave_state(folder: Path, run_id: str, name: str = "trial") -> None:
    """As a hub of that run does."""
    claim(folder, run_id, name)
    hub = a_hub(store=FileStore(folder))
    commit(hub, a_run(hub), 0)
    hub.store.close()


def state_of(folder: Path) -> object:
    store = FileStore(folder)
    try:
        return store.load()
    finally:
        store.close()


@pytest.mark.parametrize("plan", [Plan.NEW, Plan.ASIDE, Plan.REPLACE])
def test_a_run_that_starts_anew_does_not_go_on_from_what_lies_in_syncer_dir(
    tmp_path: Path, plan: Plan
) -> None:
    leave_state(tmp_path / "hub", "an earlier run")
    config = RunConfig()
    config.semi_sync.method, config.transport.kind = "diloco", "hub"
    config.syncer.dir = str(tmp_path / "hub")
    run = RunFolder(tmp_path / "trial")
    said = Console(file=StringIO(), width=500)
    try:
        request = launch.Request(config=config, ranks={0: 1}, max_restarts=0, fresh=True)
        run_id = launch._settle(run, request, Decision(plan, "why"), DataIdentity(), said)
    finally:
        run.close()
    assert isinstance(said.file, StringIO)
    assert "syncer.dir holds the hub's state of another run (an earlier run); moved" in said.file.getvalue()
    claim(tmp_path / "hub", run_id, "trial")
    assert state_of(tmp_path / "hub") is None
    (aside,) = (tmp_path / "hub").glob("earlier.*")
    assert state_of(aside) is not None


def test_a_run_that_is_continued_goes_on_from_its_own_hub_s_state(tmp_path: Path) -> None:
    leave_state(tmp_path, "this run")
    assert set_aside(tmp_path, {"this run"}, 0.0) == ""
    claim(tmp_path, "this run", "trial")
    assert state_of(tmp_path) is not None


def test_a_journal_alone_is_another_run_s_as_well(tmp_path: Path) -> None:
    leave_state(tmp_path, "an earlier run")
    (tmp_path / "state.json").unlink()
    assert "moved aside" in set_aside(tmp_path, {"this run"}, 0.0)
    assert not (tmp_path / "journal.jsonl").exists()


def test_what_does_not_belong_to_the_hub_stays_where_it_is(tmp_path: Path) -> None:
    leave_state(tmp_path, "an earlier run")
    (tmp_path / "notes.txt").touch()
    set_aside(tmp_path, set(), 0.0)
    assert (tmp_path / "notes.txt").exists()


def test_a_hub_refuses_the_state_of_another_run_by_name(tmp_path: Path) -> None:
    leave_state(tmp_path, "theirs", "theirs")
    with pytest.raises(UserError, match=r"^syncer\.dir: .* run theirs .*give syncer\.dir another folder"):
        claim(tmp_path, "mine", "mine")


def test_a_state_from_before_it_said_whose_it_is_tells_by_its_terms(tmp_path: Path) -> None:
    leave_state(tmp_path, "any")
    (tmp_path / "run.json").unlink()
    terms = json.loads((tmp_path / "state.json").read_bytes())["terms"]
    owner = owner_of(tmp_path)
    assert owner is not None and owner.run_id == terms["run_id"]


def test_a_hub_started_by_hand_takes_over_from_that_of_run_and_the_other_way_round(tmp_path: Path) -> None:
    leave_state(tmp_path, "4711", "trial")
    claim(tmp_path, "trial", "trial")
    claim(tmp_path, "4711", "trial")
    with pytest.raises(UserError):
        claim(tmp_path, "other", "other")


def test_a_hub_that_has_kept_nothing_yet_makes_the_folder_nobody_s(tmp_path: Path) -> None:
    claim(tmp_path, "a", "a")
    FileStore(tmp_path).close()
    claim(tmp_path, "b", "b")
