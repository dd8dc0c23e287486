"""Stopping a run early on purpose and continuing it with the same command: nothing is trained twice or left out."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import event_schema
from tests.helpers.real_run import LocalRun, local_run, offline, write_config

STEPS, SYNC_EVERY = 45, 5


@dataclass(frozen=True)
class Part:
    """One of the commands that together did the run."""

    code: int
    output: str
    errors: str
    states: list[dict[str, object]]
    saved: list[set[str]]
    """Checkpoints of each island."""


def second_copy(run: LocalRun) -> subprocess.CompletedProcess[str]:
    """Start island 0 once more, as somebody would who thinks that it has died."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = [
        "-m",
        "torchtitan_diloco.train",
        "--job.config_file",
        str(run.path / "config.toml"),
        "--island.id",
        "0",
    ]
    return subprocess.run(
        [sys.executable, *words], cwd=run.path.parents[1], env=offline() | rank, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def copies() -> list[subprocess.CompletedProcess[str]]:
    """Filled in by ``parts``."""
    return []


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, copies: list[subprocess.CompletedProcess[str]]
) -> tuple[LocalRun, list[Part]]:
    """SIGINT after step 8, SIGTERM after step 20, then to the end; three times the same command.

    Before either signal island 0 is started once more, by hand.
    """
    cwd = tmp_path_factory.mktemp("drained")
    config = write_config(cwd, corpus)
    parts = []
    for number, step in ((signal.SIGINT, 8), (signal.SIGTERM, 20), (None, None)):
        with local_run(
            cwd, config, "--training.steps", str(STEPS), "--debug.pace_step_seconds", "0.3"
        ) as run:
            if number is not None:
                run.until_step(step)
                copies.append(second_copy(run))
                run.signal(number)
            code = run.end()
            saved = [{path.name for path in (run.island(i) / "checkpoint").iterdir()} for i in (0, 1)]
            parts.append(Part(code, run.output, run.errors, [run.state(i) for i in (0, 1)], saved))
    return run, parts


def test_sigint_and_sigterm_end_with_75_and_the_last_command_with_0(
    parts: tuple[LocalRun, list[Part]],
) -> None:
    assert [part.code for part in parts[1]] == [75, 75, 0], [part.output + part.errors for part in parts[1]]
    assert [part.errors for part in parts[1]] == ["", "", ""]


def test_every_drained_island_says_resume_and_has_saved_the_step_it_names(
    parts: tuple[LocalRun, list[Part]],
) -> None:
    for part in parts[1][:2]:
        for island, state in enumerate(part.states):
            assert state["state"] == "resume" and state["reason"] == "SIGTERM"
            assert f"step-{state['step']}" in part.saved[island]
            assert f"island {island} saved at step {state['step']} and left" in part.output
    assert [state["state"] for state in parts[1][2].states] == ["done", "done"]


def test_fr41_a_second_copy_of_an_island_is_told_who_holds_it_and_changes_nothing(
    parts: tuple[LocalRun, list[Part]], copies: list[subprocess.CompletedProcess[str]]
) -> None:
    """That the first goes on as if nothing had happened, the other tests of this file see."""
    run, _ = parts
    assert len(copies) == 2
    for copy in copies:
        assert copy.returncode == 2 and copy.stdout == ""
        assert re.fullmatch(
            r"error: island\.id: island 0 in \S*island-0 is held by process \d+ on \S+, since [^\n]+\n",
            copy.stderr,
        ), copy.stderr
    assert len(run.incarnations(0)) == 3 and run.events(0, "error") == []
    assert not (run.island(0) / "lease.json").exists()


def test_no_inner_step_is_repeated_or_left_out(parts: tuple[LocalRun, list[Part]]) -> None:
    run, _ = parts
    for island in (0, 1):
        steps = [event["step"] for event in run.events(island, "inner")]
        assert steps == list(range(1, STEPS + 1))
        assert len(run.incarnations(island)) == 3
        assert [e["tokens"] for e in run.events(island, "end")] == [STEPS * 64]


def test_the_first_slot_after_a_resume_has_both_islands_and_no_slot_is_lost(
    parts: tuple[LocalRun, list[Part]],
) -> None:
    run, _ = parts
    assert list(run.common_digests()) == list(range(STEPS // SYNC_EVERY))
    for island in (0, 1):
        for events in run.incarnations(island):
            rounds = [event for event in events if event["event"] == "round"]
            assert rounds and all(e["committed"] and e["participants"] == [0, 1] for e in rounds)


def test_events_and_logs_of_a_drained_run_are_clean(parts: tuple[LocalRun, list[Part]]) -> None:
    run, _ = parts
    for island in (0, 1):
        assert event_schema.problems(run.events(island)) == []
        for events in run.incarnations(island)[:2]:
            (drain,) = [event for event in events if event["event"] == "drain"]
            saved = [Path(event["path"]).name for event in events if event["event"] == "checkpoint"]
            assert saved[-1] == f"step-{drain['step']}" and drain["reason"] == "SIGTERM"
            assert events[-1]["event"] == "leave" and events[-1]["reason"] == "drain"
    for words in ("Traceback", "FATAL", "core dumped", "terminate called", "of another run"):
        assert words not in run.logs()
    assert run.processes() == []
