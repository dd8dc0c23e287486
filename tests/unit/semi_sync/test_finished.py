"""An island that has finished, started again for one that has not. Over the in-memory network."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.turns import Turns, TurnsTransport
from tests.helpers.pacer import Pacer
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.memory import MemoryNet
from torchtitan_diloco.exchange.transport import Hello, Joined
from torchtitan_diloco.observe.reading import EventTail
from torchtitan_diloco.outer.state import OuterState

STEPS = 8


class Island(Pacer):
    """Of a run of two islands; each start of it is given what the one before has left."""

    def __init__(
        self,
        number: int,
        turns: Turns,
        folder: Path,
        incarnation: str,
        *,
        num_islands: int = 2,
        transport: type[TurnsTransport] = TurnsTransport,
    ) -> None:
        config = SemiSyncConfig(sync_every=2, num_islands=num_islands)
        super().__init__(
            number, turns, folder, config, steps=STEPS, incarnation=incarnation, transport=transport
        )

    def saved(self) -> tuple[int, Any, Any]:
        description, tensors = self.method.state()
        return self.step, description, {name: tensor.clone() for name, tensor in tensors.items()}

    def join(self, saved: tuple[int, Any, Any]) -> None:
        step, description, tensors = saved
        self.method.restore(description, tensors)
        self.step = self.method.join(step)

    def events(self) -> list[str]:
        return [e["event"] for e in EventTail(self.folder / f"island-{self.number}" / "events.jsonl").read()]


@pytest.fixture
def left(tmp_path: Path) -> list[tuple[int, Any, Any]]:
    """Checkpoints of two islands, of which the second was lost after its second slot and the first went on to the end."""
    turns = Turns(MemoryNet())
    islands = [Island(number, turns, tmp_path / "before", "first") for number in (0, 1)]
    for island in islands:
        island.method.join(0)
    turns.net.run(1.0)
    turns.run([partial(island.train, 4) for island in islands])
    lost = islands[1].saved()
    islands[1].method.leave("drain")
    turns.net.run(1.0)
    turns.run([partial(islands[0].train, STEPS)])
    islands[0].method.leave("done")
    assert islands[0].method.complete() and not islands[1].method.complete()
    return [islands[0].saved(), lost]


@pytest.mark.parametrize("finished_first", [True, False])
def test_an_island_that_was_lost_takes_the_final_state_of_one_that_had_finished(
    left, finished_first, tmp_path
):
    turns = Turns(MemoryNet())
    a, b = (Island(number, turns, tmp_path, "second") for number in (0, 1))
    for island in (a, b) if finished_first else (b, a):
        island.join(left[island.number])
    turns.net.run(1.0)
    # Over this network the one that is behind may be alone at first; at its next slot it learns where the run is.
    turns.run([partial(b.train, STEPS)])
    assert b.step == a.step == STEPS and b.method.complete() and a.method.complete()
    assert a.method.outer.describe() == b.method.outer.describe() == left[0][1]["outer"]
    anchor = b.method.outer.states[0].anchor
    assert torch.equal(b.model.weight.detach().flatten(), anchor)
    for island in (a, b):
        island.method.leave("done")
    assert a.events() == ["leave"]
    assert "heal" in b.events()


@pytest.mark.parametrize(
    "reason", [Resumable("waited 1 s for islands"), UserError("no Lighthouse answers")], ids=lambda r: str(r)
)
def test_a_finished_island_is_done_whether_or_not_the_others_come(left, reason, tmp_path, caplog):
    class Deserted(TurnsTransport):
        def join(self, hello: Hello, state: OuterState) -> Joined:
            assert hello.finished and hello.step == STEPS
            raise reason

    turns = Turns(MemoryNet())
    island = Island(0, turns, tmp_path, "second", transport=Deserted)
    island.join(left[0])
    assert island.step == STEPS and island.method.complete()
    assert f"leaves the others to themselves: {reason}" in caplog.text
    island.method.leave("done")


def test_an_island_that_is_alone_in_its_run_has_nobody_to_help(tmp_path):
    turns = Turns(MemoryNet())
    first = Island(0, turns, tmp_path / "before", "first", num_islands=1)
    first.method.join(0)
    turns.net.run(1.0)
    turns.run([partial(first.train, STEPS)])
    again = Island(0, Turns(MemoryNet()), tmp_path, "second", num_islands=1)
    again.join(first.saved())
    assert again.step == STEPS and again.method.transport is None
