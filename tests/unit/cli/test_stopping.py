"""How a stopped run ends, with a scripted clock and scripted children: no process, no sleep."""

import json
from pathlib import Path

from torchtitan_diloco.cli import EXIT_FAILED, EXIT_RESUMABLE
from torchtitan_diloco.cli.local.launch import _exit_code
from torchtitan_diloco.cli.local.supervisor import Island, Phase, Supervisor
from torchtitan_diloco.cli.stop import StopRequests


class ScriptedChild:
    """Told to stop, it ends with a code; with None it never does."""

    log = Path("island.log")
    pid = 1

    def __init__(self, code: int | None) -> None:
        self.code, self.told, self.killed = code, False, False

    def poll(self) -> int | None:
        return self.code if self.told else None

    def workers(self) -> list[object]:
        return []

    def signal_group(self, number: int) -> None:
        self.told = True

    def kill_tree(self) -> None:
        self.killed = True


class StoppedRun:
    """A run that is stopped at its first look at the islands, to its end.

    islands: of each, the code it ends with, the step it has reached, and what lies in its checkpoint folder.
    """

    def __init__(self, folder: Path, *islands: tuple[int | None, int, list[str]]) -> None:
        self.began = self.t = 1000.0
        self.words = ""
        self.children = {i: ScriptedChild(code) for i, (code, _, _) in enumerate(islands)}
        stop = StopRequests()
        for i, (_, step, files) in enumerate(islands):
            for name in files:
                path = folder / f"island-{i}" / "checkpoint" / name
                path.parent.mkdir(parents=True)
                path.touch()
            if step:
                event = {"t": 1, "event": "inner", "step": step, "incarnation": "i", "loss": 1.0}
                (folder / f"island-{i}").mkdir(exist_ok=True)
                (folder / f"island-{i}" / "events.jsonl").write_text(json.dumps(event) + "\n")
        supervisor = Supervisor(
            [Island(i, 1, folder / f"island-{i}") for i in self.children],
            start=lambda island: self.children[island.number],  # type: ignore[arg-type, return-value]
            max_restarts=3,
            stop=stop,
            tell=self._tell,
            each_tick=lambda: None if stop.count else stop.receive(),
            drain_limit_s=60.0,
            now=lambda: self.t,
            sleep=self._sleep,
        )
        supervisor.run()
        self.phases = [island.phase for island in supervisor.islands]
        self.code = _exit_code(supervisor, equal=True)

    def _tell(self, words: str) -> None:
        self.words += words + "\n"

    def _sleep(self, seconds: float) -> None:
        self.t += seconds
        assert self.t < self.began + 600, "it goes on for ever"


def test_a_failed_save_without_any_checkpoint_says_that_all_is_lost_and_fails(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path, (1, 7, ["step-7/outer.json"]))
    assert "ended with exit code 1 without saving; it has no checkpoint and would begin anew" in run.words
    assert run.code == EXIT_FAILED


def test_a_failed_save_names_the_checkpoint_that_counts(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path, (1, 7, ["step-5/.metadata", "step-7/outer.json"]))
    assert "ended with exit code 1 without saving; its checkpoint of step 5 counts" in run.words
    assert run.code == EXIT_RESUMABLE


def test_an_island_that_can_take_the_state_of_another_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path, (1, 7, []), (1, 7, ["step-5/.metadata"]))
    assert "island 0 ended with exit code 1 without saving; it has no checkpoint" in run.words
    assert run.code == EXIT_RESUMABLE


def test_stopped_before_the_first_step_nothing_is_lost(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path, (-15, 0, []))
    assert "ended with signal SIGTERM without saving; it has not made a step yet" in run.words
    assert run.code == EXIT_RESUMABLE


def test_an_island_that_is_frozen_is_killed_after_the_limit_which_is_told_before(tmp_path: Path) -> None:
    run = StoppedRun(tmp_path, (0, 7, ["step-7/.metadata"]), (None, 7, ["step-5/.metadata"]))
    assert "stopping: each island finishes its step and saves, within 60 s (--drain-limit); " in run.words
    assert "island 1 has not left within 60 s: killed; its checkpoint of step 5 counts" in run.words
    assert 60 <= run.t - run.began < 61
    assert run.children[1].killed and run.phases[1] is Phase.STOPPED
    assert run.code == EXIT_FAILED
