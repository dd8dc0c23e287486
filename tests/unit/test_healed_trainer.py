"""The real trainer, when its island takes another's state: before its first step, and at the run's learning rate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import islands, tiny
from torchtitan_diloco import trainer as trainer_module
from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
from torchtitan_diloco.exchange.memory import MemoryTransport
from torchtitan_diloco.exchange.transport import Heal, Hello, Joined
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD, Schedule
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.trainer import DiLoCoTrainer

EVERY, STEPS, HEALED_AT, STOPPED_AT = 4, 16, 9, 8


@dataclass(slots=True, eq=False)
class FromAnother(MemoryTransport):
    """Whoever joins finds a run that is at step 9, and takes its state."""

    def join(self, hello: Hello, state: OuterState) -> Joined:
        MemoryTransport.join(self, hello, state)
        for slot in range(HEALED_AT // EVERY):
            moved = Merged.of(torch.full((state.fragments[0].numel,), 0.125))
            state.commit(slot, 0, state.outer_step(0, slot)(moved), [7], 1000, {}, {7: {}})
        self.publish(state)
        return Joined(HEALED_AT, (Heal(7, 1, 0.0, state.states[0].version),), (0, 7))


@dataclass
class Seen:
    """By step: rates of all parameter groups as they are used, and the schedule's. first: weights of the first forward."""

    rates: dict[int, list[float]] = field(default_factory=dict)
    scheduled: dict[int, list[float]] = field(default_factory=dict)
    first: torch.Tensor | None = None
    anchor: torch.Tensor | None = None


def run(folder: Path, **options: Any) -> Seen:
    seen = Seen()
    forward = DiLoCoTrainer.forward_backward_step

    def look(self: DiLoCoTrainer, **batch: Any) -> torch.Tensor:
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        seen.rates[self.step] = [float(group["lr"]) for group in groups]
        seen.scheduled[self.step] = [
            float(lr) for s in self.lr_schedulers.schedulers for lr in s.get_last_lr()
        ]
        if seen.first is None:
            fragment = self.method.fragments[0]  # type: ignore[attr-defined]
            seen.first = self.method.parameters.snapshot(fragment).clone()  # type: ignore[attr-defined]
            seen.anchor = self.method.outer.states[0].anchor.clone()  # type: ignore[attr-defined]
        return forward(self, **batch)

    config = islands.config_of(
        "diloco",
        folder,
        sync_every=EVERY,
        layers=1,
        steps=STEPS,
        **{"lr_scheduler.warmup_steps": 6},
        **options,
    )
    with pytest.MonkeyPatch.context() as patch, tiny.single_rank():
        patch.setattr(DiLoCoTrainer, "forward_backward_step", look)
        islands.run_to_the_end(config)
    return seen


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path]:
    """An island that trains from the first step to the last, and saves at step 8."""
    folder = tmp_path_factory.mktemp("straight")
    checkpoint = IslandCheckpointManager.Config(enable=True, interval=STOPPED_AT, keep_latest_k=0)
    return run(folder, checkpoint=checkpoint), folder


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_transport", lambda *parts: FromAnother(parts[-1]))
        return run(tmp_path_factory.mktemp("healed"))


def test_fr_14_from_the_first_step_after_a_heal_on_the_learning_rate_is_the_schedule_s_and_the_source_s(
    straight: tuple[Seen, Path], healed: Seen
) -> None:
    there = straight[0].rates
    assert len({tuple(rates) for rates in there.values()}) > 10, "it differs from step to step"
    assert list(healed.rates) == list(range(HEALED_AT + 1, STEPS + 1))
    for step, rates in healed.rates.items():
        assert rates == healed.scheduled[step] == there[step], step


def test_fr_14_so_it_is_after_a_resume_from_disk(straight: tuple[Seen, Path], tmp_path: Path) -> None:
    there, folder = straight
    (tmp_path / "checkpoint").mkdir()
    (folder / "checkpoint" / f"step-{STOPPED_AT}").rename(tmp_path / "checkpoint" / f"step-{STOPPED_AT}")
    checkpoint = IslandCheckpointManager.Config(enable=True, interval=1000, keep_latest_k=0)
    resumed = run(tmp_path, checkpoint=checkpoint)
    assert list(resumed.rates) == list(range(STOPPED_AT + 1, STEPS + 1))
    for step, rates in resumed.rates.items():
        assert rates == resumed.scheduled[step] == there.rates[step], step


def test_fr_14_the_outer_learning_rate_is_a_function_of_the_slot_which_a_heal_and_a_resume_take_over() -> (
    None
):
    optimizer = OuterSGD(0.7, 0.9, True, Schedule("cosine", 0.1, 40))
    assert len({optimizer.at(slot).lr for slot in range(40)}) == 40
    again = OuterSGD(0.7, 0.9, True, Schedule("cosine", 0.1, 40))
    assert [again.at(slot).lr for slot in (9, 3, 39)] == [optimizer.at(slot).lr for slot in (9, 3, 39)]


def test_fr_30_the_first_forward_of_a_joiner_is_on_the_run_s_weights(
    straight: tuple[Seen, Path], healed: Seen
) -> None:
    assert healed.first is not None and healed.anchor is not None
    assert torch.equal(healed.first, healed.anchor)
    assert straight[0].first is not None
    assert not torch.equal(healed.first, straight[0].first), "its own initial weights are others"
