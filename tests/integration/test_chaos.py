"""`torchtitan-diloco chaos` with real islands over a hub: every kind of fault, then the figures and the exit code."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.real_run import LocalRun, local_run, write_config

PLAN = """
duration_s = 110
slow_mbit = 20
[[faults]]
at_s = 0.5
kind = "cut"
island = 1
lasts_s = 3
[[faults]]
at_s = 6
kind = "meeting"
lasts_s = 1
[[faults]]
at_s = 18
kind = "freeze"
island = 0
lasts_s = 4
[[faults]]
at_s = 24
kind = "kill"
island = 0
lasts_s = 1
[[faults]]
at_s = 24
kind = "nan"
island = 1
lasts_s = 1
[[faults]]
at_s = 50
kind = "slow"
island = 0
lasts_s = 2
[[faults]]
at_s = 55
kind = "walltime"
island = 1
lasts_s = 1
[[faults]]
at_s = 56
kind = "disk_full"
island = 0
lasts_s = 2
"""


pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Tried:
    run: LocalRun
    code: int

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads((self.run.path / "chaos.json").read_text())

    @property
    def record(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.path / "chaos.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Tried]:
    cwd = tmp_path_factory.mktemp("chaos")
    (cwd / "plan.toml").write_text(PLAN)
    arguments = (
        *("--plan", str(cwd / "plan.toml"), "--transport.kind", "hub", "--training.steps", "2000"),
        *("--debug.pace_step_seconds", "0.2", "--syncer.heartbeat_timeout_s", "3"),
        *("--semi_sync.fragments", "2", "--semi_sync.overlap", "1"),
    )
    with local_run(cwd, write_config(cwd, corpus), *arguments, command="chaos") as run:
        yield Tried(run, run.end(300))


def test_the_run_stays_sound(tried: Tried) -> None:
    assert tried.code == 0, tried.run.output + tried.run.errors
    assert tried.figures["problems"] == []
    assert "one digest for every version" in tried.run.output


def test_every_fault_was_brought_and_lifted(tried: Tried) -> None:
    kinds = ["cut", "meeting", "freeze", "kill", "nan", "slow", "walltime", "disk_full"]
    assert sorted(e["kind"] for e in tried.record if not e.get("over")) == sorted(kinds)
    assert sorted(e["kind"] for e in tried.record if e.get("over")) == sorted(kinds)
    assert tried.figures["faults"] == dict.fromkeys(kinds, 1)


def test_every_island_trained_again_after_each_fault(tried: Tried) -> None:
    last = max(e["t"] for e in tried.record)
    for island in (0, 1):
        assert any(e["t"] > last for e in tried.run.events(island, "inner")), f"island {island}"
    assert len(tried.run.incarnations(0)) >= 3 and len(tried.run.incarnations(1)) >= 3


def test_the_planted_nan_reached_nobody(tried: Tried) -> None:
    losses = [e["loss"] for e in tried.run.events(0, "inner")]
    assert all(isinstance(loss, float) and loss == loss for loss in losses)


def test_the_figures_say_what_was_lost(tried: Tried) -> None:
    figures = tried.figures
    assert set(figures["downtime_s"]) == {"kill", "cut", "nan", "freeze", "walltime", "disk_full"}
    assert figures["downtime_s"]["freeze"] > 2.5, "four seconds, less the step"
    assert 0 < figures["goodput"] < 1 and 0 < figures["expected"] < 1
    assert figures["committed"] <= figures["possible"]
