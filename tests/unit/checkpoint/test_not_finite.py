"""FR-26 alone, with the real trainer: a NaN in the weights ends up in no checkpoint, and the island gets over it."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import islands, tiny
from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
from torchtitan_diloco.trainer import DiLoCoTrainer

EVERY, STEPS, POISONED_AT = 4, 16, 6


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A run with H = 4 that saves after each step and keeps two; after step 6 a weight is NaN. What was there after each."""
    folder = tmp_path_factory.mktemp("poisoned")
    config = islands.config_of(
        "diloco", folder, sync_every=EVERY, steps=STEPS, layers=1,
        checkpoint=IslandCheckpointManager.Config(enable=True, interval=1, keep_latest_k=2),
    )  # fmt: skip
    config.metrics.log_freq = 1000  # TorchTitan ends a run whose loss is not finite at a step that it logs
    kept: list[list[str]] = []
    train_step = DiLoCoTrainer.train_step

    def step_and_look(self: DiLoCoTrainer, data: object) -> None:
        kept.append(sorted(path.parent.name for path in folder.glob("checkpoint/step-*/.metadata")))
        train_step(self, data)  # type: ignore[arg-type]
        if self.step == POISONED_AT:  # in a weight that all tokens meet: gradients and moments follow
            with torch.no_grad():
                self.model_parts[0].norm.weight[0] = torch.nan  # type: ignore[index, union-attr]

    with pytest.MonkeyPatch.context() as patch, tiny.single_rank():
        patch.setattr(DiLoCoTrainer, "train_step", step_and_look)
        islands.run_to_the_end(config)
    return folder, kept


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_fr_26_no_checkpoint_is_written_while_a_weight_is_not_finite(
    poisoned: tuple[Path, list[list[str]]],
) -> None:
    folder, _ = poisoned
    saved = [int(event["path"].rpartition("-")[2]) for event in events(folder, "checkpoint")]
    # The slot at step 8 fails, and brings the island back to the anchor of step 4.
    assert saved == [step for step in range(1, STEPS + 1) if step not in (POISONED_AT, POISONED_AT + 1)]


def test_fr_26_pruning_keeps_the_last_finite_ones_meanwhile(poisoned: tuple[Path, list[list[str]]]) -> None:
    folder, kept = poisoned
    assert {"step-4", "step-5"} <= set(kept[POISONED_AT + 1])
    for file in folder.glob("checkpoint/step-*/outer.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values())


def test_fr_26_the_island_gets_over_it_with_fresh_moments(poisoned: tuple[Path, list[list[str]]]) -> None:
    folder, _ = poisoned
    rounds = {event["round"]: event["committed"] for event in events(folder, "round")}
    assert rounds == {0: True, 1: False, 2: True, 3: True}
    assert [(e["step"], math.isfinite(e["loss"])) for e in events(folder, "inner")] == [
        (1, True),
        (STEPS, True),
    ]
