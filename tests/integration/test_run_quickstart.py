"""The shipped quickstart configuration, from a fresh folder, without network: what a run gives and leaves."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import event_schema
from tests.helpers.real_run import QUICKSTART, LocalRun, local_run

STEPS, INTERVAL = 40, 25


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """README's command with a fifth of the steps. Do not change anything in its folder."""
    cwd = tmp_path_factory.mktemp("quickstart")
    arguments = ("--islands", "2", "--ranks", "1", "--training.steps", str(STEPS))
    arguments += ("--checkpoint.interval", str(INTERVAL))
    with local_run(cwd, QUICKSTART, *arguments, name="quickstart") as run:
        assert run.end() == 0, run.output + run.errors
        yield run


def test_the_loss_of_every_island_falls_by_more_than_a_quarter_in_a_fifth_of_the_steps(run: LocalRun) -> None:
    for island in (0, 1):
        losses = {event["step"]: event["loss"] for event in run.events(island, "inner")}
        assert list(losses) == [1, *range(5, STEPS + 1, 5)]
        assert losses[STEPS] < 3 / 4 * losses[1]


def test_both_islands_hold_the_same_anchor_after_every_slot(run: LocalRun) -> None:
    assert list(run.common_digests()) == list(range(STEPS // 10))
    assert len(set(run.common_digests().values())) == STEPS // 10
    for island in (0, 1):
        for event in run.events(island, "round"):
            assert event["committed"] and event["participants"] == [0, 1] and event["method"] == "diloco"
            assert event["weights"] == [0.5, 0.5] and event["tokens"] == 2 * 10 * 4 * 128


def test_the_command_ends_with_a_table_of_both_islands_and_the_run_folder(run: LocalRun) -> None:
    for island in (0, 1):
        slot = STEPS // 10 - 1
        assert run.says_done(island, STEPS, STEPS * 4 * 128, slot, run.digests(island)[slot]), run.output
    assert f"anchors are equal at slot {STEPS // 10 - 1}" in run.output
    assert run.output.rstrip().endswith("run folder: outputs/quickstart")
    assert run.errors == ""


def test_events_and_states_are_exactly_as_in_the_contract(run: LocalRun) -> None:
    for island in (0, 1):
        events = run.events(island)
        assert event_schema.problems(events) == []
        kinds = [event["event"] for event in events if event["event"] != "waiting"]
        assert kinds[:3] == ["start", "join", "inner"] and kinds[-2:] == ["leave", "end"]
        assert "heal" not in kinds and "error" not in kinds
        assert {event["island"] for event in events} == {island}
        assert len({event["incarnation"] for event in events}) == 1
        assert [event["t"] for event in events] == sorted(event["t"] for event in events)
        assert events[-1]["tokens"] == STEPS * 4 * 128
        state = run.state(island)
        assert event_schema.state_problems(state) == []
        assert (state["state"], state["step"], state["island"]) == ("done", STEPS, island)
        assert state["incarnation"] == events[0]["incarnation"]


def test_the_run_folder_is_laid_out_as_in_the_contract(run: LocalRun) -> None:
    cwd = run.path.parents[1]
    assert {path.name for path in cwd.iterdir()} == {"outputs", "stdout", "stderr"}
    assert {path.name for path in (cwd / "outputs").iterdir()} >= {"data", "quickstart"}
    assert {path.name for path in run.path.iterdir() if not path.name.startswith(".")} == {
        *("config.toml", "run.json", "lighthouse.log", "island-0", "island-1")
    }
    record = json.loads((run.path / "run.json").read_text())
    assert record["islands"] == 2 and record["ranks"] == [1, 1] and len(record["digests"]["data"]) == 1
    for island in (0, 1):
        folder = run.island(island)
        # Beside them lie TorchTitan's own folders.
        assert {path.name for path in folder.iterdir()} >= {
            *("events.jsonl", "state.json", "logs", "tb", "checkpoint")
        }
        steps = sorted(path.name for path in (folder / "checkpoint").iterdir())
        assert steps == [f"step-{INTERVAL}", f"step-{STEPS}"]
        for step in steps:
            names = {path.name for path in (folder / "checkpoint" / step).iterdir()}
            assert names >= {".metadata", "outer.json", "outer.safetensors"}
        saved = [Path(event["path"]).name for event in run.events(island, "checkpoint")]
        assert saved == steps


def test_every_island_has_a_tensorboard_curve_of_its_loss(run: LocalRun) -> None:
    for island in (0, 1):
        curves = EventAccumulator(str(run.island(island) / "tb")).Reload()
        tags = [tag for tag in curves.Tags()["scalars"] if "loss" in tag and "avg" in tag]
        assert tags, curves.Tags()
        points = [(scalar.step, scalar.value) for scalar in curves.Scalars(tags[0])]
        logged = [(event["step"], event["loss"]) for event in run.events(island, "inner")]
        assert points == [(step, pytest.approx(loss)) for step, loss in logged]


def test_logs_of_a_run_that_goes_well_hold_no_stack_trace_and_no_abort(run: LocalRun) -> None:
    assert len(run.log_files()) == 3
    for words in ("Traceback", "FATAL", "core dumped", "terminate called", "Segmentation"):
        assert words not in run.logs()
    assert "of another run" not in run.logs()


def test_nothing_of_the_run_is_left(run: LocalRun) -> None:
    assert run.processes() == []


@pytest.mark.slow
def test_in_the_whole_quickstart_the_loss_falls_by_more_than_a_third_within_three_minutes(
    tmp_path: Path,
) -> None:
    with local_run(tmp_path, QUICKSTART, "--islands", "2", "--ranks", "1", name="quickstart") as run:
        assert run.end(within_s=180) == 0, run.output + run.errors
        assert list(run.common_digests()) == list(range(20))
        for island in (0, 1):
            losses = [event["loss"] for event in run.events(island, "inner")]
            assert losses[-1] < 2 / 3 * losses[0]
