"""An island with a sync_every of its own under TorchTitan's trainer: its own steps, the run's learning rate."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.helpers import tiny
from tests.helpers.islands import config_of, run_to_the_end
from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
from torchtitan_diloco.outer.slots import SlotClock

H, STEPS, OWN = 4, 13, 9


def train(folder: Path, own: int | None) -> dict[str, Any]:
    config = config_of(
        "diloco",
        folder,
        sync_every=H,
        steps=STEPS,
        vocab=61,
        checkpoint=IslandCheckpointManager.Config(enable=True, interval=11),
        **{"lr_scheduler.warmup_steps": 5, "island.own_sync_every": own},
    )
    with tiny.single_rank():
        result = run_to_the_end(config)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    result["lr"] = {event["step"]: event["lr"] for event in events if event["event"] == "inner"}
    result["sends"] = {event["round"]: event["step"] for event in events if event["event"] == "round"}
    return result


def test_the_learning_rate_is_that_of_run_progress_also_after_a_resume(tmp_path: Path) -> None:
    run, fast = train(tmp_path / "run", None), train(tmp_path / "fast", OWN)
    clock = SlotClock(H, STEPS, own=OWN)
    assert (run["steps"], fast["steps"]) == (STEPS, clock.last_step) == (13, 30)
    assert run["sends"] == {0: 4, 1: 8, 2: 12, 3: 13}
    assert fast["sends"] == {0: 9, 1: 18, 2: 27, 3: 30}
    assert len(set(run["lr"].values())) > 6, "the schedule moves"
    # An event has the rate that its step was trained with, which is the rate after the step before it.
    for step, rate in fast["lr"].items():
        assert rate == run["lr"][clock.progress(step - 1) + 1], step
    for slot in (0, 1, 2):
        assert fast["lr"][fast["sends"][slot] + 1] == run["lr"][run["sends"][slot] + 1]

    shutil.copytree(tmp_path / "fast/checkpoint/step-11", tmp_path / "resumed/checkpoint/step-11")
    resumed = train(tmp_path / "resumed", OWN)
    assert resumed["lr"] == {step: rate for step, rate in fast["lr"].items() if step > 11}
    assert resumed["logged"] == fast["logged"][11:]
    assert resumed["weights"] == fast["weights"] != run["weights"]
