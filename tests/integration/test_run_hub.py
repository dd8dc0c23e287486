"""A real run over a hub, which is killed, and one of whose islands is killed: both come back, the anchors stay equal."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.real_run import LocalRun, local_run, write_config

SYNC_EVERY, PACE_S = 5, 0.2


@dataclass(frozen=True)
class Hubbed:
    """killed: when hub and island 1 were (epoch seconds)."""

    run: LocalRun
    hub_killed: float
    island_killed: float
    code: int


@pytest.fixture(scope="module")
def hubbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Hubbed]:
    cwd = tmp_path_factory.mktemp("hubbed")
    arguments = (
        *("--transport.kind", "hub", "--training.steps", "150", "--debug.pace_step_seconds", str(PACE_S)),
        *("--semi_sync.fragments", "2", "--semi_sync.overlap", "1", "--semi_sync.codec.wire", "int8"),
        *("--semi_sync.codec.error_feedback", "--syncer.save_every", "7"),
    )
    with local_run(cwd, write_config(cwd, corpus), *arguments) as run:
        run.until_step(2 * SYNC_EVERY)
        (hub,) = [p for p in run.processes() if "syncer" in p.cmdline()]
        hub.kill()
        hub_killed = time.time()
        before = len(run.common_digests())
        run.until(lambda: len(run.common_digests()) >= before + 3)
        for victim in run.trainers(1):
            victim.kill()
        island_killed = time.time()
        code = run.end()
        yield Hubbed(run, hub_killed, island_killed, code)


def test_the_run_ends_well(hubbed: Hubbed) -> None:
    assert hubbed.code == 0, hubbed.run.output + hubbed.run.errors
    assert "anchors are equal" in hubbed.run.output
    assert "hub ended with code -9" in hubbed.run.output and "hub started again" in hubbed.run.output


def test_the_hub_that_ends_with_the_run_has_saved_its_last_versions(hubbed: Hubbed) -> None:
    saved = json.loads((hubbed.run.path / "syncer" / "state.json").read_text())["state"]
    last = {e["fragment"]: e["digest"] for e in hubbed.run.events(0, "round") if e["committed"]}
    assert {i: entry["digest"] for i, entry in enumerate(saved["fragments"])} == last


def test_no_version_has_two_digests(hubbed: Hubbed) -> None:
    digests: dict[tuple[int, int], set[str]] = {}
    for island in (0, 1):
        for event in hubbed.run.events(island, "round"):
            if event["committed"]:
                digests.setdefault((event["fragment"], event["version"]), set()).add(event["digest"])
    assert len(digests) >= 20
    assert {len(found) for found in digests.values()} == {1}


def test_the_killed_island_takes_the_state_from_the_hub_before_its_first_step(hubbed: Hubbed) -> None:
    back = hubbed.run.incarnations(1)[-1]
    # Admitted between a slot's last inner step and its outcome, it takes part in the slot first.
    kinds = [event["event"] for event in back if event["event"] not in ("waiting", "checkpoint", "round")]
    assert kinds[:4] == ["start", "heal", "join", "inner"]
    heal = next(event for event in back if event["event"] == "heal")
    assert heal["source"] == -1 and heal["bytes"] > 0


def test_up_and_down_are_counted(hubbed: Hubbed) -> None:
    """int8 both ways: what the hub sends is encoded once more. What was on its way when the hub died is sent again."""
    rounds = [e for e in hubbed.run.events(0, "round") if e["committed"] and e["participants"] == [0, 1]]
    more = [e["bytes_sent"] / e["bytes_received"] for e in rounds if e["bytes_sent"] != e["bytes_received"]]
    assert len(rounds) >= 10 and len(more) <= 4, more
    assert all(e["bytes_received"] > 0 for e in rounds)


@pytest.mark.timeout(240)
def test_a_run_whose_hub_has_workers_goes_on_when_one_of_them_dies(tmp_path: Path, corpus: Path) -> None:
    arguments = (
        *(
            "--transport.kind",
            "hub",
            "--syncer.workers",
            "2",
            "--semi_sync.fragments",
            "4",
            "--training.steps",
            "60",
        ),
        *("--debug.pace_step_seconds", str(PACE_S)),
    )
    with local_run(tmp_path, write_config(tmp_path, corpus), *arguments) as run:
        run.until_step(2 * SYNC_EVERY)
        workers = [p for p in run.processes() if "torchtitan_diloco.hub.worker_process" in p.cmdline()]
        assert len(workers) == 2
        workers[0].kill()
        assert run.end() == 0, run.output + run.errors
        assert "hub ended with code 75" in run.output and "hub started again" in run.output
        assert "anchors are equal" in run.output
        assert len(run.common_digests()) >= 40
        assert run.processes() == []
