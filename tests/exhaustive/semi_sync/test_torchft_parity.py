"""On the same inner updates, our trajectories are those of TorchFT's own ``local_sgd.DiLoCo``, wherever both can.

TorchFT takes P fragments with H a multiple of P and tau < H / P. Its schedule is ours tau steps earlier: of slot k it sends
after ``(k + 1) H / P - tau`` steps and applies after ``(k + 1) H / P``, where we send after ``(k + 1) H / P`` and apply tau
steps later. So its first window is tau steps shorter, and from then on both send every ``H / P`` steps: TorchFT's counter
of local steps, begun at -tau, gives our schedule. Also, at the end of a run we send every fragment once more, TorchFT
sends nothing; the comparison ends before.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn
from torchft.local_sgd import DiLoCo as TorchFTDiLoCo
from torchft.manager import Manager
from torchft.work import _DummyWork

from tests.golden.turns import Turns, TurnsTransport
from torchtitan_diloco.config.own import MergeConfig, OuterConfig, SemiSyncConfig
from torchtitan_diloco.exchange.memory import MemoryNet
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.semi_sync import Setup, make_method

WINDOWS = 4

Trajectory = list[torch.Tensor]
"""All parameters of an island, flat, after each step."""


@dataclass(frozen=True)
class Setting:
    islands: int = 2
    fragments: int = 1
    sync_every: int = 6
    overlap: int = 0
    alpha: float = 0.0
    outer: OuterConfig = field(default_factory=OuterConfig)

    @property
    def steps(self) -> int:
        return WINDOWS * self.sync_every + self.overlap


def make_model(fragments: int) -> nn.Sequential:
    """The same weights every time; fragment i is ``model[i]``, of a size of its own."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(5, 7 + i), nn.LayerNorm(7 + i)) for i in range(fragments))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def updates(model: nn.Module, island: int, step: int) -> list[torch.Tensor]:
    """What the inner step adds to each parameter: the same for both implementations, whatever the parameters."""
    generator = torch.Generator().manual_seed(1000 * island + step)
    return [torch.randn(p.shape, generator=generator) * 0.05 for p in model.parameters()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def train_ours(folder: Path, setting: Setting) -> list[Trajectory]:
    turns = Turns(MemoryNet())
    trajectories: list[Trajectory] = [[] for _ in range(setting.islands)]
    calls = []
    for island in range(setting.islands):
        model = make_model(setting.fragments)
        group = IslandGroup()
        method = make_method(
            Setup(
                config=SemiSyncConfig(
                    sync_every=setting.sync_every,
                    module_fqns_per_fragment=[[str(i)] for i in range(setting.fragments)],
                    overlap=setting.overlap,
                    mix_alpha=setting.alpha,
                    num_islands=setting.islands,
                    outer=setting.outer,
                    merge=MergeConfig(weight="equal"),
                ),
                steps=setting.steps + 1,
                island=island,
                incarnation="only",
                started=0.0,
                run_id="parity",
                group=group,
                parameters=IslandParameters([model], group),
                trace=Trace(folder / f"island-{island}", island, "only"),
                drain=DrainFlag(),
                make_transport=partial(TurnsTransport, net=turns.net, turns=turns),
            )
        )
        method.join(0)

        def train(island: int = island, model: nn.Module = model, method=method) -> None:
            for step in range(1, setting.steps + 1):
                with torch.no_grad():
                    for parameter, update in zip(
                        model.parameters(), updates(model, island, step), strict=True
                    ):
                        parameter.add_(update)
                method.after_inner_step(step, 1)
                trajectories[island].append(flat(model))

        calls.append(train)
    turns.net.run(1.0)
    turns.run(calls)
    return trajectories


class Average:
    """The islands' tensors of each call, averaged as TorchFT's manager does: the sum over the number of participants."""

    def __init__(self, islands: int) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(islands, timeout=20)

    def __call__(self, island: int, tensor: torch.Tensor, should_quantize: bool = False) -> _DummyWork:
        self.tensors[island] = tensor
        self.barrier.wait()
        total = self.tensors[0].clone()
        for i in range(1, len(self.tensors)):
            total += self.tensors[i]
        self.barrier.wait()  # everybody has read what everybody gave
        tensor.copy_(total / len(self.tensors))
        return _DummyWork(tensor)


def make_manager(island: int, average: Average) -> Manager:
    manager = create_autospec(Manager)
    manager._use_async_quorum = False
    commits = iter(range(1, 1_000_000))
    manager.current_step.return_value = 0

    def commit() -> bool:
        manager.current_step.return_value = next(commits)
        return True

    manager.should_commit.side_effect = commit
    manager.allreduce.side_effect = partial(average, island)
    return manager


def train_torchft(setting: Setting) -> list[Trajectory]:
    trajectories: list[Trajectory] = [[] for _ in range(setting.islands)]
    average = Average(setting.islands)
    errors: list[BaseException] = []

    def train(island: int) -> None:
        model = make_model(setting.fragments)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)  # p - 1.0 * (-update), the very sum
        outer = [
            torch.optim.SGD(
                part.parameters(),
                lr=setting.outer.lr,
                momentum=setting.outer.momentum,
                nesterov=setting.outer.nesterov,
            )
            for part in model
        ]
        with TorchFTDiLoCo(
            make_manager(island, average),
            list(model),
            inner,
            outer,
            setting.sync_every,
            fragment_sync_delay=setting.overlap,
            fragment_update_alpha=setting.alpha,
        ) as diloco:
            diloco._local_step = -setting.overlap  # see above
            for step in range(1, setting.steps + 1):
                for parameter, update in zip(model.parameters(), updates(model, island, step), strict=True):
                    parameter.grad = -update
                inner.step()
                trajectories[island].append(flat(model))

    run_threads([partial(train, island) for island in range(setting.islands)], errors)
    if errors:
        raise errors[0]
    return trajectories


def run_threads(calls: Sequence[Callable[[], None]], errors: list[BaseException]) -> None:
    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by whoever reads ``errors``
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)


NESTEROV, PLAIN = OuterConfig(), OuterConfig(lr=1.0, momentum=0.0, nesterov=False)


def compare(folder: Path, setting: Setting, bitwise: bool) -> None:
    ours, theirs = train_ours(folder, setting), train_torchft(setting)
    for mine, upstream in zip(ours, theirs, strict=True):
        assert len(mine) == len(upstream) == setting.steps
        for step, (a, b) in enumerate(zip(mine, upstream, strict=True), start=1):
            if bitwise:
                assert torch.equal(a, b), f"step {step}: {(a != b).sum()} of {a.numel()} elements differ"
            else:
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-6, msg=lambda m, step=step: f"step {step}: {m}"
                )
    if setting.alpha == 0.0 and setting.fragments == 1 and setting.overlap == 0:
        assert torch.equal(ours[0][-1], ours[1][-1])
    assert not torch.allclose(ours[0][0], ours[0][-1], atol=0.1), "nothing moved"


@pytest.mark.parametrize("islands", [2, 3])
def test_one_fragment_without_overlap(islands, tmp_path):
    compare(tmp_path, Setting(islands, outer=NESTEROV), bitwise=False)


@pytest.mark.parametrize("momentum, nesterov", [(0.9, False), (0.0, False)])
def test_other_outer_optimizers(momentum, nesterov, tmp_path):
    outer = OuterConfig(lr=0.4, momentum=momentum, nesterov=nesterov)
    compare(tmp_path, Setting(fragments=2, outer=outer), bitwise=False)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(
    "fragments, sync_every, overlap", [(1, 6, 2), (2, 6, 0), (2, 6, 2), (3, 6, 1), (4, 8, 1), (3, 12, 3)]
)
def test_fragments_with_overlap_and_mixing(fragments, sync_every, overlap, alpha, tmp_path):
    compare(tmp_path, Setting(2, fragments, sync_every, overlap, alpha, NESTEROV), bitwise=False)


@pytest.mark.parametrize("fragments, sync_every, overlap", [(1, 6, 0), (2, 6, 2), (3, 12, 3)])
def test_the_same_bits_where_the_arithmetic_is_the_same(fragments, sync_every, overlap, tmp_path):
    """Two islands and plain SGD with lr 1: halves are exact, and torch.optim.SGD fuses no product into the sum."""
    compare(tmp_path, Setting(2, fragments, sync_every, overlap, 0.0, PLAIN), bitwise=True)
