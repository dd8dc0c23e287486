"""An island whose inner step adds a constant, over the in-memory network: for tests of when things happen."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.golden.turns import Turns, TurnsTransport
from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.semi_sync.diloco import DiLoCo


class Pacer:
    """Not joined yet. own: its inner steps between two slots, where they are not the run's."""

    def __init__(
        self,
        number: int,
        turns: Turns,
        folder: Path,
        config: SemiSyncConfig,
        *,
        steps: int,
        own: int | None = None,
        incarnation: str = "first",
        transport: type[TurnsTransport] = TurnsTransport,
    ) -> None:
        self.number, self.folder = number, folder
        self.model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.model.weight.zero_()
        self.method: DiLoCo = method_of(
            self.model,
            config,
            folder,
            partial(transport, net=turns.net, turns=turns),
            island=number,
            steps=steps,
            sync_every=own,
            incarnation=incarnation,
        )
        self.step = 0

    @torch.no_grad()
    def train(self, until: int) -> None:
        while self.step < until:
            self.model.weight.add_(1.0 + self.number)
            self.step = self.method.after_inner_step(self.step + 1, 10)
