"""Islands of one run that make different numbers of inner steps between two slots. Over the in-memory network."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from tests.golden.compare import rounds
from tests.golden.turns import Turns, TurnsTransport
from tests.helpers.methods import method_of
from tests.helpers.pacer import Pacer
from torchtitan_diloco.config.own import MergeConfig, SemiSyncConfig
from torchtitan_diloco.exchange.memory import BULK_TIMEOUT_S, MemoryNet, MemoryTransport
from torchtitan_diloco.semi_sync.diloco import DiLoCo

STEPS = 40  # of run progress
CONFIG = SemiSyncConfig(sync_every=10, num_islands=2)


def pacer(number: int, own: int, turns: Turns, folder: Path) -> Pacer:
    return Pacer(number, turns, folder, CONFIG, steps=STEPS, own=own)


class Slow(TurnsTransport):
    """Of an island that takes 40 times as long for a step."""

    def progress(self, step: int) -> None:
        TurnsTransport.progress(self, step)
        for _ in range(39):
            self._hand_over()


def test_fr_57_and_fr_07_a_slow_island_is_waited_for_longer_than_any_time_out(tmp_path: Path) -> None:
    turns = Turns(MemoryNet())
    islands = [
        Pacer(i, turns, tmp_path, CONFIG, steps=STEPS, transport=transport)
        for i, transport in enumerate((TurnsTransport, Slow))
    ]
    for island in islands:
        island.method.join(0)
    turns.net.run(1.0)
    began = turns.net.now
    turns.run([partial(island.train, STEPS) for island in islands])
    assert turns.net.now - began > 4 * BULK_TIMEOUT_S, (
        "each of the four slots was waited for longer than that"
    )
    for island in islands:
        events = rounds(tmp_path / f"island-{island.number}")
        assert [e["round"] for e in events] == [0, 1, 2, 3]
        assert all(e["committed"] and e["participants"] == [0, 1] for e in events)
        assert all("stall_s" in e for e in events)
    assert torch.equal(islands[0].model.weight, islands[1].model.weight)


@pytest.mark.parametrize(
    "weight, shares", [("tokens", [5 / 6, 1 / 6]), ("steps", [5 / 6, 1 / 6]), ("equal", [1 / 2, 1 / 2])]
)
def test_fr_57_an_island_five_times_slower_may_make_a_fifth_of_the_steps_and_weighs_as_set(
    tmp_path: Path, weight: Literal["tokens", "steps", "equal"], shares: list[float]
) -> None:
    turns = Turns(MemoryNet())
    config = replace(CONFIG, merge=MergeConfig(weight=weight))
    fast, slow = [Pacer(i, turns, tmp_path, config, steps=STEPS, own=own) for i, own in enumerate((10, 2))]
    for island in (fast, slow):
        island.method.join(0)
    turns.net.run(1.0)
    turns.run([partial(fast.train, 40), partial(slow.train, 8)])
    for island in (fast, slow):
        assert island.method.complete() and island.step == island.method.last_step()
        events = rounds(tmp_path / f"island-{island.number}")
        assert [e["round"] for e in events] == [0, 1, 2, 3]
        for event in events:
            assert event["participants"] == [0, 1]
            assert event["weights"] == pytest.approx(shares)
    assert torch.equal(fast.model.weight, slow.model.weight)


def test_a_joiner_goes_on_where_the_run_is_in_steps_of_its_own(tmp_path: Path) -> None:
    turns = Turns(MemoryNet())
    first = pacer(0, 10, turns, tmp_path)
    first.method.join(0)
    turns.net.run(1.0)
    turns.run([partial(first.train, 24)])
    second = pacer(1, 5, turns, tmp_path)
    second.step = second.method.join(0)
    assert second.step == 12 and second.method.next_slot == 2
    turns.net.run(1.0)
    turns.run([partial(first.train, 40), partial(second.train, 20)])
    for island in (first, second):
        assert island.step == island.method.last_step() and island.method.complete()
        events = rounds(tmp_path / f"island-{island.number}")
        assert [e["participants"] for e in events if e["round"] >= 2] == [[0, 1], [0, 1]]
    assert first.method.outer is not None and second.method.outer is not None
    assert first.method.outer.describe() == second.method.outer.describe()


def test_a_slow_joiner_of_a_fast_run_does_not_pass_a_slot(tmp_path: Path) -> None:
    turns = Turns(MemoryNet())
    first = pacer(0, 50, turns, tmp_path)
    first.method.join(0)
    turns.net.run(1.0)
    turns.run([partial(first.train, 99)])  # one step before its second slot
    second = pacer(1, 5, turns, tmp_path)
    second.step = second.method.join(0)
    assert (second.step, second.method.next_slot) == (9, 1)
    turns.net.run(1.0)
    turns.run([partial(first.train, 200), partial(second.train, 20)])
    assert [e["participants"] for e in rounds(tmp_path / "island-1")] == [[0, 1]] * 3


def test_an_island_goes_on_from_its_checkpoint_with_the_pace_it_had(tmp_path: Path) -> None:
    net = MemoryNet()

    def alone(own: int | None, steps_of_run: int = 10, incarnation: str = "first") -> DiLoCo:
        config = SemiSyncConfig(sync_every=steps_of_run)
        model = nn.Linear(3, 1, bias=False)
        transport = lambda merge: MemoryTransport(merge, net)
        return method_of(
            model, config, tmp_path, transport, steps=STEPS, sync_every=own, incarnation=incarnation
        )

    method = alone(20)
    method.join(0)
    for step in range(1, 46):
        assert method.after_inner_step(step, 10) == step
    assert method.progress(45) == 22
    description, tensors = method.state()
    method.leave("drain")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    again = alone(20, incarnation="second")
    again.restore(description, tensors)
    assert again.join(45) == 45
    for step in range(46, 81):
        assert again.after_inner_step(step, 10) == step
    assert [e["round"] for e in rounds(tmp_path / "island-0")] == [0, 1, 2, 3]
    assert again.complete() and again.last_step() == 80

    alone(40, steps_of_run=20).restore(description, tensors)  # steps mean the same
    for own in (None, 10, 40):
        with pytest.raises(
            ValueError, match=r"made 20 steps for 10 of the run, .*\[\[islands\]\] semi_sync.sync_every"
        ):
            alone(own).restore(description, tensors)
