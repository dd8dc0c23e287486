"""Shards on their way through page-locked memory: the CPU goes through an accelerator's motions, and gives the same bits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_diloco.island import parameters, staging
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.island.staging import Staging
from torchtitan_diloco.outer.fragments import balanced


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_copies_give_the_bits_of_direct_ones(dtype, alpha, monkeypatch):
    found = []
    for staged in (False, True):
        monkeypatch.setattr(parameters, "Staging", partial(Staging, staged=staged))
        island = IslandParameters([model(dtype)], IslandGroup())
        fragments = balanced(list(island.specs.values()), 2)
        for fragment in fragments:
            flat = island.snapshot(fragment)
            assert flat is not None
            island.scatter(fragment, flat * 3 + 1, alpha)
        found.append([island.snapshot(fragment) for fragment in fragments])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Recorder:
    """A device module that writes down what it is asked for, and does nothing else."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "training"

    def Stream(self) -> "RecordedStream":
        return RecordedStream(self, "side")

    def Event(self) -> "RecordedEvent":
        return RecordedEvent(self)

    def current_stream(self) -> "RecordedStream":
        return RecordedStream(self, self.current)

    def stream(self, stream: "RecordedStream") -> Any:
        recorder = self

        class Context:
            def __enter__(self) -> None:
                recorder.current = stream.name

            def __exit__(self, *_: object) -> None:
                recorder.current = "training"

        return Context()


class RecordedStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_stream(self, other: "RecordedStream") -> None:
        self.recorder.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "RecordedEvent") -> None:
        self.recorder.log.append(f"{self.name} waits for the copies on {event.stream}")


class RecordedEvent:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.stream = recorder, "nothing"

    def record(self, stream: RecordedStream) -> None:
        self.stream = stream.name

    def synchronize(self) -> None:
        self.recorder.log.append(f"the host waits for {self.stream}")


def test_fetching_runs_beside_training_and_pushing_on_its_stream(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(staging.torch, "get_device_module", lambda _: recorder)
    staged = Staging(torch.device("cpu"), staged=True)
    with staged.fetching():
        recorder.log.append(f"copies on {recorder.current}")
    assert recorder.log == [
        "side waits for training",
        "copies on side",
        "training waits for the copies on side",
        "the host waits for side",
    ]
    recorder.log.clear()
    with staged.pushing():
        recorder.log.append(f"copies on {recorder.current}")
    assert recorder.log == ["copies on training", "the host waits for training"]


def test_a_cpu_waits_for_nothing_and_reuses_its_buffer(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(staging.torch, "get_device_module", lambda _: recorder)
    plain = Staging(torch.device("cpu"))
    with plain.fetching(), plain.pushing():
        pass
    assert not plain.staged and recorder.log == []
    assert plain.buffer(10).data_ptr() == plain.buffer(7).data_ptr()
