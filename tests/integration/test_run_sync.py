"""`run` with gradients averaged in every step: the quickstart, an island that is killed, a stop, islands that do not fit."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchft.coordination import LighthouseServer

from tests.helpers import event_schema
from tests.helpers.real_run import QUICKSTART, HandStarted, LocalRun, local_run, traces_of_ours, write_config
from torchtitan_diloco.cli.data import main as data_command

pytestmark = pytest.mark.slow

STEPS, SYNC_EVERY, PACE_S = 20, 10, 0.3
SYNC = ("--semi_sync.method", "sync")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """README's command with another method and a sixth of the steps. Do not change anything in its folder."""
    cwd = tmp_path_factory.mktemp("sync")
    arguments = (
        "--islands",
        "2",
        "--ranks",
        "1",
        *SYNC,
        "--training.steps",
        str(STEPS),
        "--metrics.log_freq",
        "1",
    )
    with local_run(cwd, QUICKSTART, *arguments, name="quickstart") as run:
        assert run.end() == 0, run.output + run.errors
        yield run


def test_both_islands_hold_the_same_parameters_after_every_slot_and_the_table_says_so(run: LocalRun) -> None:
    digests = run.common_digests()
    assert list(digests) == [0, 1] and len(set(digests.values())) == 2
    for island in (0, 1):
        assert run.says_done(island, STEPS, STEPS * 4 * 128, 1, digests[1]), run.output
    assert "anchors are equal at slot 1" in run.output and run.errors == ""


def test_events_are_as_in_the_contract_and_a_round_sums_up_its_steps(run: LocalRun) -> None:
    for island in (0, 1):
        events = run.events(island)
        assert event_schema.problems(events) == []
        kinds = [event["event"] for event in events if event["event"] != "waiting"]
        assert kinds[:3] == ["start", "join", "inner"] and kinds[-2:] == ["leave", "end"]
        assert "heal" not in kinds and "error" not in kinds
        assert [e["step"] for e in events if e["event"] == "inner"] == list(range(1, STEPS + 1))
        for number, event in enumerate(e for e in events if e["event"] == "round"):
            assert (event["version"], event["method"]) == ((number + 1) * SYNC_EVERY, "sync")
            assert (event["participants"], event["weights"]) == ([0, 1], [0.5, 0.5])
            assert event["tokens"] == 2 * SYNC_EVERY * 4 * 128
            assert event["bytes_sent"] > SYNC_EVERY * 4 * 6_000_000  # every gradient, once
            assert 0 < event["exchange_s"] <= event["stall_s"]
    losses = [[e["loss"] for e in run.events(island, "inner")] for island in (0, 1)]
    assert all(mine[-1] < 0.9 * mine[0] for mine in losses) and losses[0] != losses[1]


def test_every_sample_is_accounted_for_step_by_step(
    run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_command(["audit", str(run.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == report["notes"] == [] and report["slot"] == STEPS - 1
    (epoch,) = report["epochs"]
    assert epoch["consumed"] == STEPS * 2 * 4 and epoch["consumed"] + epoch["unread"] == epoch["samples"]


def test_nothing_is_left_and_no_log_holds_a_stack_trace(run: LocalRun) -> None:
    for words in ("Traceback", "FATAL", "core dumped", "terminate called", "Segmentation"):
        assert words not in run.logs()
    assert run.processes() == []


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[tuple[LocalRun, LocalRun]]:
    """Island 1 is killed and comes back; then the run is stopped, and the same command goes on to the end."""
    cwd = tmp_path_factory.mktemp("battered-sync")
    config = write_config(cwd, corpus)
    arguments = (*SYNC, "--training.steps", "60", "--debug.pace_step_seconds", str(PACE_S))
    with local_run(cwd, config, *arguments) as run:
        run.until_step(7)
        for trainer in run.trainers(1):
            trainer.kill()
        run.until(lambda: _rounds(run, 1) >= 2 and len(run.incarnations(1)) == 2)
        run.signal(signal.SIGINT)
        assert run.end() == 75, run.output + run.errors
    with local_run(cwd, config, *arguments) as resumed:
        assert resumed.end() == 0, resumed.output + resumed.errors
        yield run, resumed


def _rounds(run: LocalRun, island: int) -> int:
    return sum(event["event"] == "round" for event in run.incarnations(island)[-1])


def test_a_killed_island_takes_the_others_state_before_its_first_step(
    battered: tuple[LocalRun, LocalRun],
) -> None:
    run, _ = battered
    before, back = run.incarnations(1)[:2]
    kinds = [event["event"] for event in back if event["event"] != "waiting"]
    assert kinds[:3] == ["start", "heal", "join"] and kinds.count("heal") == 1
    assert kinds[3 : kinds.index("inner")] in ([], ["round"])  # its first step may be a slot's last
    heal, join, first = (next(e for e in back if e["event"] == kind) for kind in ("heal", "join", "inner"))
    assert heal["source"] == 0 and first["step"] == join["step"] + 1
    assert first["step"] > max(e["step"] for e in before if e["event"] == "inner") + 1  # the other went on
    assert "island 1 ended with exit code 1; starting it again" in run.output
    alone = [e for e in run.events(0, "inner") if e["t"] < heal["t"]]
    assert alone[-1]["step"] >= first["step"] - 1


def test_parameters_are_equal_in_every_slot_that_both_islands_closed(
    battered: tuple[LocalRun, LocalRun],
) -> None:
    run, resumed = battered
    common = resumed.common_digests()
    # One before the kill, two by the incarnation that came back, one at least after the stop; more if it was back soon.
    assert len(set(common.values())) == len(common) >= 4
    together = {e["round"] for e in run.events(0, "round") if e["participants"] == [0, 1]}
    assert (
        common.keys() <= together and len(together - common.keys()) <= 1
    )  # it was killed in the middle of a slot
    assert max(common) == 60 // 5 - 1
    assert resumed.path == run.path


def test_after_a_stop_no_step_is_made_again_and_none_is_left_out(battered: tuple[LocalRun, LocalRun]) -> None:
    run, resumed = battered
    assert "continuing the unfinished run" in resumed.output
    for island in (0, 1):
        assert run.state(island)["state"] == "done" and resumed.state(island)["step"] == 60
        starts = [[e["step"] for e in events if e["event"] == "inner"] for events in run.incarnations(island)]
        assert starts[-1][0] == starts[-2][-1] + 1 and starts[-1][-1] == 60
        assert starts[-1] == list(range(starts[-1][0], 61))
        assert event_schema.problems(run.events(island)) == []
        (drain,) = run.events(island, "drain")
        assert drain["reason"] == "SIGTERM"
    assert traces_of_ours(resumed.logs()) == []


def test_the_audit_finds_no_sample_that_was_consumed_twice(
    battered: tuple[LocalRun, LocalRun], capsys: pytest.CaptureFixture[str]
) -> None:
    data_command(["audit", str(battered[1].path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["slot"] == 59
    assert sum(epoch["repeated"] for epoch in report["epochs"]) == 0


def test_islands_with_other_layouts_are_refused_in_one_sentence(tmp_path: Path, corpus: Path) -> None:
    """Started by hand, so that no launcher sees both: island 1 has two ranks, and a learning rate of its own."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=3000
    )
    with contextlib.ExitStack() as stack:
        stack.callback(server.shutdown)
        address = "http://127.0.0.1:" + server.address().rpartition(":")[2].rstrip("/")
        started = []
        for island, more in enumerate(((), ("--optimizer.lr", "0.5"))):
            cwd = tmp_path / f"cluster-{island}"
            cwd.mkdir()
            arguments = ("--island.id", str(island), "--lighthouse.address", address, *SYNC, *more)
            started.append(
                HandStarted(
                    cwd,
                    write_config(cwd, corpus),
                    *arguments,
                    "--lighthouse.patience_s",
                    "60",
                    ranks=island + 1,
                    name="other-layout",
                )
            )
            stack.callback(started[-1].stop)
        assert started[1].end() == 1
        state = started[1].state(1)
        assert state["state"] == "fatal"
        assert re.match(
            r"island 1 and island 0 must agree on optimizer.lr: 0.5 here, 0.001 there; ranks: 2 here, 1 there; "
            r"the ranks' shards: ",
            state["reason"],
        )
        assert started[1].output.count(f"error: {state['reason']}\n") == 1
        assert started[0].process.poll() is None and started[0].events(0, "inner") == []
        for one in started:
            assert traces_of_ours(one.output) == []
