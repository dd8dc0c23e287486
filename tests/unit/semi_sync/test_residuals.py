"""Residuals of deltas and of owned slices through the production method: restarts, and slots that are given up."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.golden.turns import Turns, TurnsTransport
from tests.helpers.methods import method_of
from torchtitan_diloco.checkpoint.manager import read_outer, write_outer
from torchtitan_diloco.config.own import CodecConfig, SemiSyncConfig
from torchtitan_diloco.exchange.memory import MemoryNet
from torchtitan_diloco.exchange.transport import Joined
from torchtitan_diloco.semi_sync.diloco import DiLoCo

ISLANDS = 5
INT4 = CodecConfig(wire="int4", block=4, error_feedback=True)
CONFIG = SemiSyncConfig(sync_every=4, fragments=2, num_islands=ISLANDS, codec=INT4)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))


@torch.no_grad()
def train(island: int, model: Bare, method: DiLoCo, steps: range) -> None:
    for step in steps:
        noise = torch.Generator().manual_seed(100 * step + island)
        for parameter in model.parameters():
            parameter.add_(torch.randn(50, generator=noise))
        method.after_inner_step(step, 10 + island)
    method.pause()


def started(folder: Path, models: list[Bare]) -> tuple[Turns, list[DiLoCo]]:
    turns = Turns(MemoryNet())
    make = partial(TurnsTransport, net=turns.net, turns=turns)
    return turns, [
        method_of(model, CONFIG, folder, make, island=i, steps=20) for i, model in enumerate(models)
    ]


def go_on(turns: Turns, models: list[Bare], methods: list[DiLoCo], steps: range) -> None:
    for method in methods:
        assert method.join(steps.start - 1) == steps.start - 1
    turns.net.run(1.0)
    turns.run([partial(train, i, models[i], methods[i], steps) for i in range(ISLANDS)])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
def test_owners_go_on_from_a_checkpoint_with_their_residuals(kept, tmp_path):
    """All islands stop after step 5, between two slots, and come back; without these residuals the bits would be others."""
    models = [[Bare() for _ in range(ISLANDS)] for _ in range(2)]
    turns, straight = started(tmp_path / "straight", models[0])
    go_on(turns, models[0], straight, range(1, 6))
    turns.run([partial(train, i, models[0][i], straight[i], range(6, 13)) for i in range(ISLANDS)])

    turns, stopped = started(tmp_path / "stopped", models[1])
    go_on(turns, models[1], stopped, range(1, 6))
    turns, resumed = started(tmp_path / "resumed", models[1])
    for i, (before, after) in enumerate(zip(stopped, resumed, strict=True)):
        write_outer(tmp_path / f"step-5-{i}", *before.state())
        saved = read_outer(tmp_path / f"step-5-{i}")
        assert saved is not None
        description, tensors = saved
        owned = [name for name in tensors if name.startswith("residual.") and name.endswith("]")]
        assert len(owned) == 2 and all(tensors[name].any() for name in owned)
        after.restore(description, {n: t for n, t in tensors.items() if kept or n not in owned})
    go_on(turns, models[1], resumed, range(6, 13))
    digests = [[s.digest for s in m.outer.states] for m in (straight[0], resumed[0]) if m.outer is not None]
    assert (digests[0] == digests[1]) == kept


def test_a_slot_that_the_run_has_gone_past_leaves_no_proposal_open(tmp_path):
    """An island heals from one in which the slot it still waits for had failed: its residual stays, the next slot encodes."""
    turns = Turns(MemoryNet())
    model = Bare()
    config = SemiSyncConfig(sync_every=2, fragments=2, overlap=1, codec=INT4)
    method = method_of(model, config, tmp_path, partial(TurnsTransport, net=turns.net, turns=turns), steps=20)
    method.join(0)
    turns.net.run(1.0)
    with torch.no_grad():
        model.first.add_(1.0)
    method.after_inner_step(1, 10)
    assert [flight.slot for flight in method.flights] == [0]

    def heal(step: int) -> Joined:
        assert method.outer is not None
        method.outer.fail(4)
        return Joined(step)

    method._take_state(heal, 1)
    assert method.flights == [] and method.next_slot == 5
    train(0, model, method, range(2, 10))
    assert method.outer is not None and [state.version for state in method.outer.states] == [1, 2]
