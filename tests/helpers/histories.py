"""Islands whose states are made up: as restored from their own disks after so many slots, over the in-memory network."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.golden.turns import Turns, TurnsTransport
from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.exchange.memory import MemoryNet
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.semi_sync.diloco import DiLoCo

SIZE = 6
BOTH = (0, 1)


class Bare(nn.Module):
    """Parameters and nothing else: ``w0``, ``w1`` and so on."""

    def __init__(self, value: float, fragments: int) -> None:
        super().__init__()
        for i in range(fragments):
            self.register_parameter(f"w{i}", nn.Parameter(torch.full((SIZE,), value)))


def go_on(
    state: OuterState, slots: int, tokens: int, islands: tuple[int, ...] = BOTH, delta: float = 0.01
) -> None:
    """Commit so many slots more."""
    for slot in range(state.slot, state.slot + slots):
        fragment = slot % len(state.states)
        size = state.fragments[fragment].numel
        advance = state.outer_step(fragment, slot)(Merged.of(torch.full((size,), delta)))
        state.commit(slot, fragment, advance, list(islands), tokens, {}, {i: {} for i in islands})


@dataclass
class Learner:
    """One start of an island with H = 1, whose inner steps add ``drift`` to all parameters and have ``tokens`` tokens."""

    island: int
    folder: Path
    turns: Turns
    value: float = 0.0
    tokens: int = 10
    drift: float = 0.5
    incarnation: str = "first"
    config: SemiSyncConfig = field(default_factory=lambda: SemiSyncConfig(sync_every=1, num_islands=2))
    step: int = 0
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Bare(self.value, self.config.fragments)
        transport = partial(TurnsTransport, net=self.turns.net, turns=self.turns)
        self.method: DiLoCo = method_of(
            self.model,
            self.config,
            self.folder,
            transport,
            island=self.island,
            steps=100_000,
            incarnation=self.incarnation,
        )

    def fresh(self) -> OuterState:
        fragments = self.method.fragments
        return self.method._found([torch.full((f.numel,), self.value) for f in fragments])

    def restore(self, state: OuterState) -> None:
        """Come back with this state, and weights that are its anchors."""
        self.method.outer = state.copy()
        for fragment, held in zip(self.method.fragments, state.states, strict=True):
            self.method.parameters.scatter(fragment, held.anchor)
        self.method.next_slot = state.slot
        self.step = state.slot * self.config.sync_every // self.config.fragments

    def join(self) -> None:
        self.step = self.method.join(self.step)

    @torch.no_grad()
    def train(self, until: int) -> None:
        """Inner steps, until the island is at step ``until``."""
        while self.step < until:
            for parameter in self.model.parameters():
                parameter.add_(self.drift)
            self.steps.append(self.step + 1)
            self.step = self.method.after_inner_step(self.step + 1, self.tokens)

    @property
    def outer(self) -> OuterState:
        assert self.method.outer is not None
        return self.method.outer

    @property
    def transport(self) -> TurnsTransport:
        assert isinstance(self.method.transport, TurnsTransport)
        return self.method.transport

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"island-{self.island}" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [e for e in events if e["event"] == kind and e["incarnation"] == self.incarnation]

    def forks(self) -> list[Path]:
        """Histories put aside."""
        return sorted((self.folder / f"island-{self.island}").glob("forks/*"))

    def move(self, turns: Turns) -> None:
        """To another network: from now on it reaches only who is there."""
        node = self.transport
        node.net.nodes.pop(self.island, None)
        node.net.renew()
        node.net.run(1.0)
        node.net = node.turns.net if node.turns is turns else turns.net
        node.turns = turns
        turns.net.nodes[self.island] = node
        turns.net.renew()
        turns.net.run(1.0)


def network() -> Turns:
    """Epochs of no two networks have one name."""
    turns = Turns(MemoryNet())
    turns.net._epochs = itertools.count(1000 * next(_NETWORKS))
    return turns


_NETWORKS = itertools.count()


def together(turns: Turns, *calls: Callable[[], None]) -> None:
    turns.run(list(calls))
