"""What is done to inner steps to try a run out."""

import time
from pathlib import Path

import pytest
import torch

from torchtitan_diloco.island.trial import Trial, poison
from torchtitan_diloco.observe.injection import INJECT


def test_a_step_lasts_at_least_as_long_as_its_pace() -> None:
    began = time.monotonic()
    Trial(0.05, None).after_step(began, [])
    assert time.monotonic() - began >= 0.05
    late = time.monotonic()
    Trial(0.05, None).after_step(late - 1.0, [])
    assert time.monotonic() - late < 0.04, "one that took longer waits no more"


def test_one_value_of_each_parameter_becomes_nan_and_only_once(tmp_path: Path) -> None:
    weights = [torch.zeros(0), torch.zeros(2, 3), torch.zeros(4)]
    trial = Trial(0.0, tmp_path)
    trial.after_step(0.0, weights)
    assert all(bool(w.isfinite().all()) for w in weights)
    (tmp_path / INJECT).write_text("nan\n")
    trial.after_step(0.0, weights)
    assert [int(w.isnan().sum()) for w in weights] == [0, 1, 1]
    for weight in weights:
        weight.zero_()
    trial.after_step(0.0, weights)
    assert all(bool(w.isfinite().all()) for w in weights)


def test_without_leave_nobody_plants_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(INJECT).write_text("nan\n")
    weights = [torch.zeros(2)]
    Trial(0.0, None).after_step(0.0, weights)
    assert bool(weights[0].isfinite().all())


def test_scalars_can_be_poisoned_and_nothing_at_all_is_no_fault() -> None:
    scalar = torch.zeros(())
    poison([scalar])
    assert bool(scalar.isnan())
    poison([])
