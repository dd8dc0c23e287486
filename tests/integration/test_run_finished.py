"""A run that one island has ended and the other has not: the same command ends it, on the same bits."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers import event_schema
from tests.helpers.real_run import local_run, write_config

pytestmark = pytest.mark.slow

STEPS = 20


@pytest.mark.parametrize("method", ["diloco", "sync"])
def test_an_island_that_was_lost_before_the_end_takes_the_final_state_of_the_other(
    tmp_path: Path, corpus: Path, method: str
) -> None:
    config = write_config(tmp_path, corpus)
    arguments = ("--training.steps", str(STEPS), "--semi_sync.method", method)
    with local_run(tmp_path, config, *arguments) as run:
        assert run.end() == 0, run.output + run.errors
    # As a kill of island 1 for good after its first checkpoint leaves it.
    shutil.rmtree(run.island(1) / "checkpoint" / f"step-{STEPS}")
    (run.island(1) / "state.json").unlink()
    with local_run(tmp_path, config, *arguments) as again:
        assert again.end() == 0, again.output + again.errors
    assert "continuing the unfinished run" in again.output and "(not done: island 1)" in again.output
    back = again.incarnations(1)[-1]
    kinds = [event["event"] for event in back if event["event"] != "waiting"]
    assert kinds == ["start", "heal", "join", "checkpoint", "leave", "end"]
    assert {again.state(i)["state"] for i in (0, 1)} == {"done"}
    assert (again.island(1) / "checkpoint" / f"step-{STEPS}" / ".metadata").is_file()
    assert f"island 1 is done at step {STEPS}" in again.output
    digest = again.digests(0)[3]
    assert re.search(rf"^ +1 done +{STEPS} .* {digest[:10]} @ 3 *$", again.output, re.MULTILINE), again.output
    assert "anchors are equal at slot 3" in again.output
    for island in (0, 1):
        assert event_schema.problems(again.events(island)) == []
