"""One island of a golden run: a small model with its own inner AdamW and data, beside the real method.

What it leaves behind has the layout of a real run folder, so one comparison reads both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.golden.reference import Outer
from torchtitan_diloco.checkpoint.manager import write_outer
from torchtitan_diloco.config.own import MergeConfig, OuterConfig, SemiSyncConfig
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.semi_sync import Setup, make_method
from torchtitan_diloco.semi_sync.diloco import DiLoCo

VOCABULARY = 61  # odd, so that no number of ranks divides it
ROW = 8  # tokens


@dataclass(frozen=True)
class Plan:
    """How one island trains. Islands may differ in it: sync_every, and rows of ``ROW`` tokens per inner step and rank.

    All but ``width``, the size of the model's layers.
    """

    sync_every: int
    steps: int
    rows: int = 2
    dtype: str = "float32"
    width: int = 12


@dataclass(frozen=True)
class Case:
    """What the islands of a run have in common."""

    method: str = "diloco"
    weight: str = "tokens"
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def config(self, plan: Plan, islands: int) -> SemiSyncConfig:
        return SemiSyncConfig(
            method=self.method,
            sync_every=plan.sync_every,
            num_islands=islands,
            outer=OuterConfig(lr=self.lr, momentum=self.momentum, nesterov=self.nesterov),
            merge=MergeConfig(weight=self.weight),  # type: ignore[arg-type]
        )

    def outer(self) -> Outer:
        """The same, as the reference takes it."""
        if self.method == "local_sgd":
            return Outer(weight=self.weight)
        return Outer(self.lr, self.momentum, self.nesterov, self.weight)


class RunningScale(nn.Module):
    """Divides by a running magnitude, kept in a persistent buffer that training changes outside the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.magnitude: torch.Tensor
        self.register_buffer("magnitude", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.magnitude.mul_(0.9).add_(0.1 * x.abs().mean())
        return x / (self.magnitude + 0.1)


def make_model(seed: int, width: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Embedding(VOCABULARY, width),
            nn.Linear(width, width + 8),
            RunningScale(),
            nn.GELU(),
            nn.Linear(width + 8, VOCABULARY),
        )


class Island:
    """One rank of it. Islands begin with different weights, so whoever does not found adopts the founder's."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        case: Case,
        folder: Path,
        make_transport: Callable[..., Any],
        *,
        islands: int,
        run_id: str = "golden",
        shard: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.plan, self.folder = plan, folder / f"island-{number}"
        self.model = make_model(100 + number, plan.width).to(getattr(torch, plan.dtype))
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.group = IslandGroup()
        self.trace = Trace(self.folder if self.group.rank == 0 else None, number, f"incarnation-{number}")
        self.data = torch.Generator().manual_seed(1000 * number + self.group.rank)
        self.step = 0
        setup = Setup(
            config=case.config(plan, islands),
            steps=plan.steps,
            island=number,
            incarnation=f"incarnation-{number}",
            started=float(number),
            run_id=run_id,
            group=self.group,
            parameters=IslandParameters([self.model], self.group),
            trace=self.trace,
            drain=DrainFlag(),
            make_transport=make_transport,
            dump_sends=self.folder / "sends",
        )
        method = make_method(setup)
        assert isinstance(method, DiLoCo)
        self.method = method

    @property
    def tokens_per_step(self) -> int:
        return self.plan.rows * ROW * self.group.size

    def inner_step(self) -> None:
        tokens = torch.randint(VOCABULARY, (self.plan.rows, ROW + 1), generator=self.data)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.trace.step = self.step

    def train_to_send(self) -> None:
        """Inner steps until a slot is due, which is then sent."""
        slot = None
        while slot is None:
            self.inner_step()
            slot = self.method.count(self.step, self.tokens_per_step)
        self.method.send(slot)

    def settle(self, outcome: Outcome) -> None:
        self.step = self.method.settle(outcome, self.step)

    def train(self) -> None:
        """The whole run, waiting at every slot; for a real transport."""
        self.step = self.method.join(0)
        while self.step < self.plan.steps:
            self.inner_step()
            self.step = self.method.after_inner_step(self.step, self.tokens_per_step)

    def finish(self) -> None:
        """Leave the run, and what it came to on disk. The last slot's anchor must have become the local parameters."""
        local = self.method.parameters.snapshot(self.method.fragments[0])
        if self.method.outer is not None:
            assert local is not None
            trained_in = getattr(torch, self.plan.dtype)
            assert torch.equal(local, self.method.outer.states[0].anchor.to(trained_in).float())
        description, tensors = self.method.state()
        if description:
            write_outer(self.folder / "checkpoint" / f"step-{self.step}", description, tensors)
        self.method.leave("done")
        self.trace.close()
