"""Several runs on one machine never meet; a run of one island needs no Lighthouse."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import event_schema
from tests.helpers.real_run import LocalRun, local_run, write_config
from torchtitan_diloco.data.run_audit import audit_run

pytestmark = pytest.mark.slow

ARGUMENTS = ("--training.steps", "10")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[tuple[LocalRun, LocalRun]]:
    """The same command at the same time in two folders; in the second, island 1 makes two steps for one of island 0."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    configs = [write_config(folder, corpus) for folder in folders]
    with configs[1].open("a") as file:
        file.write("[[islands]]\nid = 0\n[[islands]]\nid = 1\nsemi_sync.sync_every = 10\n")
    with (
        local_run(folders[0], configs[0], *ARGUMENTS) as first,
        local_run(folders[1], configs[1], *ARGUMENTS) as second,
    ):
        for run in (first, second):
            assert run.end(within_s=180) == 0, run.output + run.errors
        yield first, second


def test_two_runs_at_once_both_finish_with_ids_and_lighthouses_of_their_own(
    pair: tuple[LocalRun, LocalRun],
) -> None:
    ids, addresses = set(), set()
    for run in pair:
        assert list(run.common_digests()) == [0, 1]
        assert [run.state(i)["state"] for i in (0, 1)] == ["done", "done"]
        ids.add(json.loads((run.path / "run.json").read_text())["run_id"])
        addresses |= set(re.findall(r"Lighthouse (http://127.0.0.1:\d+)", run.output))
    assert len(ids) == len(addresses) == 2


def test_islands_with_different_numbers_of_steps_between_slots_share_slots_and_learning_rate(
    pair: tuple[LocalRun, LocalRun],
) -> None:
    run = pair[1]
    rates = []
    for island, own in ((0, 5), (1, 10)):
        inner = run.events(island, "inner")
        assert [event["step"] for event in inner] == list(range(1, 2 * own + 1))
        assert [(e["round"], e["step"]) for e in run.events(island, "round")] == [(0, own), (1, 2 * own)]
        rates.append({event["step"]: event["lr"] for event in inner})
    assert rates[0][5 + 1] == rates[1][10 + 1]
    assert [rates[1][step] for step in range(1, 11)] == [
        rates[0][1 + (step - 1) // 2] for step in range(1, 11)
    ]
    for island in (0, 1):
        # tokens^2 / steps: in twice the steps twice the tokens.
        assert all(e["weights"] == [1 / 3, 2 / 3] for e in run.events(island, "round"))
    assert run.state(1)["state"] == "done" and run.state(1)["step"] == 20


def test_nothing_that_either_of_two_runs_writes_mentions_the_other(pair: tuple[LocalRun, LocalRun]) -> None:
    for run, other in (pair, pair[::-1]):
        record = json.loads((other.path / "run.json").read_text())
        (port,) = re.findall(r"Lighthouse http://127.0.0.1:(\d+)", other.output)
        incarnations = [other.state(i)["incarnation"] for i in (0, 1)]
        strangers = [record["run_id"], f"127.0.0.1:{port}", str(other.path.parents[1]), *incarnations]
        written = [
            path for path in run.path.rglob("*") if path.suffix in (".log", ".jsonl", ".json", ".toml")
        ]
        text = "\n".join(path.read_text(errors="replace") for path in written) + run.output + run.errors
        assert len(written) > 8
        assert [stranger for stranger in strangers if stranger in text] == []
        assert "of another run" not in text
        for island in (0, 1):
            assert all(e["participants"] == [0, 1] for e in run.events(island, "round"))


def test_one_island_without_a_method_trains_alone_and_no_lighthouse_is_started(
    tmp_path: Path, corpus: Path
) -> None:
    arguments = ("--islands", "1", "--semi_sync.method", "none", "--training.steps", "25")
    with local_run(tmp_path, write_config(tmp_path, corpus), *arguments) as run:
        assert run.end() == 0, run.output + run.errors
    assert "| no Lighthouse" in run.output and not (run.path / "lighthouse.log").exists()
    assert event_schema.problems(run.events(0)) == []
    kinds = [event["event"] for event in run.events(0)]
    assert "round" not in kinds and "heal" not in kinds and kinds[0] == "start" and kinds[-1] == "end"
    assert [event["step"] for event in run.events(0, "inner")] == list(range(1, 26))
    losses = [event["loss"] for event in run.events(0, "inner")]
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    assert run.state(0)["state"] == "done"
    report = audit_run([run.path])
    assert report.ok and not report.slots and report.slot == 25 and report.notes == []
    (epoch,) = report.epochs
    assert (epoch.consumed, epoch.unread) == (25, epoch.samples - 25)
    for words in ("Traceback", "FATAL", "core dumped", "terminate called"):
        assert words not in run.logs()
