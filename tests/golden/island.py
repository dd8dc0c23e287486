"""One island of a golden run: a small model with its own inner AdamW and data, beside the real method.

What it leaves behind has the layout of a real run folder, so one comparison reads both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.golden.codec_reference import Wire
from tests.golden.compare import Paces
from tests.golden.reference import Outer
from torchtitan_diloco.checkpoint.manager import write_outer
from torchtitan_diloco.config.own import CodecConfig, MergeConfig, OuterConfig, SemiSyncConfig
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters, canonical_tensors
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
    """What the islands of a run have in common.

    run: its sync_every and steps, from which each island's own follow; without it an island's plan says both.
    """

    method: str = "diloco"
    weight: str = "tokens"
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    schedule: str = "constant"
    least: float = 0.25
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    wire: str = "fp32"
    feedback: bool = False
    rounding: str = "nearest"
    block: int | None = None
    density: float | None = None
    run: tuple[int, int] | None = None

    def config(self, plan: Plan, islands: int) -> SemiSyncConfig:
        return SemiSyncConfig(
            method=self.method,
            sync_every=self.run[0] if self.run else plan.sync_every,
            fragments=self.fragments,
            overlap=self.overlap,
            mix_alpha=self.alpha,
            num_islands=islands,
            outer=OuterConfig(
                lr=self.lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                schedule=self.schedule,  # type: ignore[arg-type]
                min_lr_factor=self.least,
            ),
            merge=MergeConfig(weight=self.weight),  # type: ignore[arg-type]
            codec=CodecConfig(
                wire=self.wire,
                error_feedback=self.feedback,
                rounding=self.rounding,  # type: ignore[arg-type]
                block=self.block,
                density=self.density,
            ),
        )

    def outer(self, run: str = "golden", islands: int = 1, slots: int = 0) -> Outer:
        """The same, as the reference takes it.

        run: its id. islands: how many found it; up to four it makes no difference. slots: of the run, if a schedule counts.
        """
        lr, momentum, nesterov = (
            (1.0, 0.0, False) if self.method == "local_sgd" else (self.lr, self.momentum, self.nesterov)
        )
        wire = Wire(self.wire, self.block, self.density, self.rounding == "stochastic")
        return Outer(
            lr,
            momentum,
            nesterov,
            self.schedule,
            self.weight,
            self.fragments,
            self.overlap,
            self.alpha,
            wire,
            self.feedback,
            run,
            islands,
            slots,
            least=self.least,
        )


def slots_of(case: Case, plan: Plan) -> int:
    """Of the whole run: those before its last step, and one of every fragment at it."""
    sync_every, steps = case.run or (plan.sync_every, plan.steps)
    return (steps - 1) * case.fragments // sync_every + case.fragments


def paces(
    plans: Sequence[Plan],
    ranks: Sequence[int] | None = None,
    skipped: Mapping[int, Collection[int]] | None = None,
) -> Paces:
    """What the reference is told of the islands."""
    return Paces(
        {i: plan.sync_every for i, plan in enumerate(plans)},
        {i: plan.steps for i, plan in enumerate(plans)},
        {i: plan.rows * ROW * (ranks[i] if ranks else 1) for i, plan in enumerate(plans)},
        skipped or {},
    )


class RunningScale(nn.Module):
    """Divides by a running magnitude, kept in a persistent buffer that training changes outside the optimizer."""

    def __init__(self) -> None:
        super().__init__()
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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self.folder = plan, folder / f"island-{number}"
        self.model = make_model(100 + number, plan.width).to(getattr(torch, plan.dtype))
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.group = IslandGroup()
        self.trace = Trace(self.folder if self.group.rank == 0 else None, number, f"incarnation-{number}")
        self.data = torch.Generator().manual_seed(1000 * number + self.group.rank)
        self.step = 0
        self.recorded: dict[str, torch.Tensor] = {}
        setup = Setup(
            config=case.config(plan, islands),
            steps=case.run[1] if case.run else plan.steps,
            sync_every=plan.sync_every,
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
            settings=dict(settings or {}),
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

    def join(self) -> None:
        self.step = self.method.join(0)

    def train(self) -> None:
        """The whole run after ``join``; the parameters before and after each exchange are kept for ``finish``."""
        while self.step < self.plan.steps:
            self.inner_step()
            made = self.step
            self.record("before", made)
            self.step = self.method.after_inner_step(made, self.tokens_per_step)
            self.record("after", made)

    def record(self, moment: str, step: int) -> None:
        """This island's parameters now, by name, as float32. All ranks."""
        held = {name: whole(tensor) for name, tensor in canonical_tensors([self.model])}
        self.recorded |= {f"{moment} {step} {name}": t.float().clone() for name, t in held.items()}

    def finish(self) -> None:
        if self.group.is_gateway:
            save_file(self.recorded, self.folder / "parameters.safetensors")
        description, tensors = self.method.state()
        if description:
            write_outer(self.folder / "checkpoint" / f"step-{self.step}", description, tensors)
        self.method.leave("done")
        self.trace.close()
