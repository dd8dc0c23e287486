"""Settings of the network that could not work are refused before anything starts."""

from pathlib import Path

import pytest

from tests.helpers.mistakes import problems

MISTAKES = {
    "NCCL's lists of interfaces (FR-11)": (
        '[island]\nadvertise = "^lo,docker0"',
        "FILE:2: island.advertise: must be one interface or one address",
    ),
    "a hub that gives islands up between two signs of life": (
        '[transport]\nkind = "hub"\n[syncer]\nheartbeat_timeout_s = 0.01',
        "FILE:4: syncer.heartbeat_timeout_s: (0.01 s) must be more than lighthouse.heartbeat_interval_s",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused(name: str, tmp_path: Path) -> None:
    text, begins = MISTAKES[name]
    (found,) = problems(tmp_path, text)
    assert found.startswith(begins), found
