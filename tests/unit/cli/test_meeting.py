"""Where the islands of a local run meet."""

import pytest

from torchtitan_diloco.cli.local.meeting import meeting_place
from torchtitan_diloco.config.reach import await_lighthouse
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


def config(folder: str = "", spools: tuple[str, ...] = ()) -> RunConfig:
    made = RunConfig()
    made.semi_sync.method = "diloco"
    made.transport.kind = "spool"
    made.transport.dir = folder
    made.syncer.spools = list(spools)
    return made


@pytest.mark.parametrize("folder, spools", [("", ()), ("/a", ()), ("", ("/a",)), ("/a", ("/b",))])
def test_a_local_run_over_a_spool_needs_one_folder_for_both_sides(folder, spools):
    meeting = meeting_place(config(folder, spools))
    assert meeting is not None
    with pytest.raises(UserError, match=r"transport\.dir and syncer\.spools"):
        meeting.check()


def test_a_local_run_over_a_spool_starts_a_hub_and_no_lighthouse():
    meeting = meeting_place(config("/a", ("/a",)))
    assert meeting is not None
    meeting.check()
    assert (meeting.name, meeting.address) == ("hub", "")


def test_an_island_behind_a_spool_waits_for_no_address():
    await_lighthouse(config("/a"), say=lambda line: None)
    with pytest.raises(UserError, match=r"transport\.dir is empty"):
        await_lighthouse(config(), say=lambda line: None)
