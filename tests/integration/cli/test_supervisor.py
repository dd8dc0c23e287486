"""Restart delays and bounds with a scripted clock and scripted children: no process, no sleep."""

import itertools
import json
from pathlib import Path

import pytest

from torchtitan_diloco.cli.local.supervisor import Island, Phase, Supervisor
from torchtitan_diloco.cli.run import parse_ranks, split_overrides
from torchtitan_diloco.cli.stop import StopRequests
from torchtitan_diloco.errors import UserError


class DyingChild:
    """Ends with code 1 as soon as it is looked at."""

    log = Path("island.log")

    def poll(self) -> int:
        return 1

    def kill_tree(self) -> None:
        pass

    def log_tail(self) -> str:
        return "boom"


class Clock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.t = 1000.0

    def now(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds


def supervise(
    folder: Path, max_restarts: int, progress_at_start: set[int] | None = None
) -> tuple[Island, list[float]]:
    """Run one island that always dies; its start times. At the starts of `progress_at_start` it reaches a new step."""
    clock, starts = Clock(), []
    island = Island(0, 1, folder)

    def start(island: Island) -> DyingChild:
        starts.append(clock.t)
        if len(starts) in (progress_at_start or set()):
            event = {"t": clock.t, "event": "inner", "step": len(starts), "incarnation": "i", "loss": 1.0}
            with (folder / "events.jsonl").open("a") as file:
                file.write(json.dumps(event) + "\n")
        return DyingChild()

    Supervisor(
        [island],
        start=start,  # type: ignore[arg-type]
        max_restarts=max_restarts,
        stop=StopRequests(),
        tell=lambda message: None,
        now=clock.now,
        sleep=clock.sleep,
    ).run()
    return island, starts


def test_restart_delays_double_from_one_second_to_thirty(tmp_path: Path) -> None:
    island, starts = supervise(tmp_path, max_restarts=7)
    delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert delays == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.4)
    assert island.phase is Phase.FAILED and island.restarts == 7


def test_progress_starts_the_count_of_restarts_anew(tmp_path: Path) -> None:
    island, starts = supervise(tmp_path, max_restarts=2, progress_at_start={2, 4})
    assert len(starts) == 6, "start 2 and start 4 got further, then two restarts in vain"
    assert island.phase is Phase.FAILED


def test_repeating_steps_that_were_reached_before_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"t": 1, "event": "inner", "step": 50, "incarnation": "a"}) + "\n"
    )
    _, starts = supervise(tmp_path, max_restarts=2, progress_at_start={1, 2, 3})
    assert len(starts) == 3


def test_the_end_of_an_earlier_incarnation_does_not_make_this_one_done(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"t": 1, "event": "end", "step": 50, "incarnation": "a"}) + "\n"
    )
    island, _ = supervise(tmp_path, max_restarts=0)
    assert island.phase is Phase.FAILED


def test_a_state_of_an_earlier_incarnation_does_not_count(tmp_path: Path) -> None:
    island = Island(0, 1, tmp_path, incarnation="new", launched_at=100.0)
    state = {"state": "fatal", "incarnation": "old", "t": 99.0}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert island.state() is None
    (tmp_path / "state.json").write_text(json.dumps(state | {"t": 101.0}))
    assert island.state() is not None


@pytest.mark.parametrize(
    ("text", "expected"), [("1", [1, 1, 1]), ("2,1,4", [2, 1, 4]), (" 2 , 1,1", [2, 1, 1])]
)
def test_ranks_are_one_number_or_one_per_island(text: str, expected: list[int]) -> None:
    assert parse_ranks(text, 3) == expected


@pytest.mark.parametrize("text", ["0", "1,2", "a", "", "1,,1", "-1"])
def test_other_ranks_are_refused_naming_the_option(text: str) -> None:
    with pytest.raises(UserError, match=r"^--ranks"):
        parse_ranks(text, 3)


def test_settings_are_told_from_the_commands_own_options() -> None:
    own, overrides = split_overrides(
        [
            "--training.steps",
            "5",
            "--debug.deterministic",
            "f.toml",
            "--ranks",
            "2",
            "--optimizer.lr=1e-3",
            "--fresh",
        ]
    )
    assert own == ["f.toml", "--ranks", "2", "--fresh"]
    assert overrides == ["--training.steps", "5", "--debug.deterministic", "--optimizer.lr=1e-3"]


def why(folder: Path, log: str, *events: dict[str, object]) -> str:
    """What is said of an island that has ended with code 1, after these lines of its log and these events."""
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    island = Island(0, 1, folder)

    class Dead(DyingChild):
        def log_tail(self) -> str:
            return log

    def start(island: Island) -> DyingChild:
        with (folder / "events.jsonl").open("a") as file:
            for event in events:
                file.write(json.dumps({"t": 1000.0, "step": 0, "incarnation": "i", **event}) + "\n")
        return Dead()

    clock = Clock()
    Supervisor(
        [island],
        start=start,  # type: ignore[arg-type]
        max_restarts=0,
        stop=StopRequests(),
        tell=said.append,
        now=clock.now,
        sleep=clock.sleep,
    ).run()
    (words,) = said
    return words


def test_an_island_that_ended_is_told_with_its_own_word_the_signal_or_its_log(tmp_path: Path) -> None:
    killed = "  exitcode  : -9 (pid: 71)\n  traceback : Signal 9 (SIGKILL) received by PID 71\n=====\n"
    full = {"event": "error", "kind": "disk", "message": "job.dump_folder: the disk is full"}
    fork = {"event": "error", "kind": "fork", "message": "a history of its own"}
    assert why(tmp_path / "a", killed).endswith(
        "a rank of it (process 71) was ended by SIGKILL; its log is island.log"
    )
    assert why(tmp_path / "b", killed, full).endswith("given up; job.dump_folder: the disk is full")
    assert why(tmp_path / "c", "boom").endswith("last lines of island.log:\nboom")
    assert why(tmp_path / "d", "boom", fork).endswith("last lines of island.log:\nboom")
    # What an earlier incarnation has said is not this one's.
    assert why(tmp_path / "e", "boom", full, {"event": "start"}).endswith("last lines of island.log:\nboom")
