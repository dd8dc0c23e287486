"""Whole runs, inner training included, against a NumPy simulation of all of it, in float64."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.island import Case, Plan
from tests.golden.reference import shares
from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.outer.fragments import Fragment, TensorSpec
from torchtitan_diloco.semi_sync import Setup, make_method

SLOTS = 10
SIZES = {"w.first": 5, "w.second": 3}  # the linear model's weights, in two tensors
INNER_LR = 0.05
PLANS = [Plan(7, 7 * SLOTS - 3, rows=4), Plan(4, 4 * SLOTS, rows=6), Plan(9, 9 * SLOTS - 8, rows=3)]


def batch(island: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (rows, 8) and targets (rows,) of a linear law that differs a little between islands."""
    law = np.linspace(-1.0, 1.0, 8) + 0.2 * np.sin(np.arange(8) + island)
    x = np.random.default_rng([island, step]).normal(size=(rows, 8))
    return x, x @ law


def beginning() -> np.ndarray:
    return np.random.default_rng(7).normal(size=8)


class Float64Parameters:
    """In place of IslandParameters, which always exchanges float32."""

    def __init__(self) -> None:
        halves = np.split(beginning(), [SIZES["w.first"]])
        self.tensors = {
            name: torch.tensor(half, requires_grad=True) for name, half in zip(SIZES, halves, strict=True)
        }
        self.specs = {name: TensorSpec(name, (size,), torch.float64) for name, size in SIZES.items()}

    def snapshot(self, fragment: Fragment) -> torch.Tensor:
        return fragment.flatten({name: t.detach() for name, t in self.tensors.items()}, torch.float64)

    @torch.no_grad()
    def scatter(self, fragment: Fragment, flat: torch.Tensor) -> None:
        for spec, values in fragment.views(flat):
            self.tensors[spec.name].copy_(values)


def train_ours(folder: Path, case: Case) -> list[np.ndarray]:
    """The anchor after each slot, of islands that run the production method over the memory transport."""
    net = MemoryNet()
    parameters = [Float64Parameters() for _ in PLANS]
    methods = []
    for i, plan in enumerate(PLANS):
        setup = Setup(
            config=case.config(plan, len(PLANS)),
            steps=plan.steps,
            island=i,
            incarnation="only",
            started=float(i),
            run_id="toy",
            group=IslandGroup(),
            parameters=parameters[i],  # type: ignore[arg-type]
            trace=Trace(folder / f"island-{i}", i, "only"),
            drain=DrainFlag(),
            make_transport=partial(MemoryTransport, net=net),
        )
        methods.append(make_method(setup))
        methods[i].join(0)
    net.run(1.0)
    steps = [0] * len(PLANS)
    anchors = []
    for _ in range(SLOTS):
        for i, (plan, method) in enumerate(zip(PLANS, methods, strict=True)):
            slot = None
            while slot is None:
                inner_step(parameters[i], *batch(i, steps[i], plan.rows))
                steps[i] += 1
                slot = method.count(steps[i], plan.rows * 8)
            method.send(slot)
        for i, method in enumerate(methods):
            while (outcome := method.poll(0.05)) is None:
                assert net.now < 1000.0
            assert outcome.status == "committed"
            method.settle(outcome, steps[i])
        ends = [method.outer.states[0].anchor.numpy() for method in methods]
        assert all(end.tobytes() == ends[0].tobytes() for end in ends)
        anchors.append(ends[0])
    assert steps == [plan.steps for plan in PLANS]
    for method in methods:
        method.leave("done")
    return anchors


def inner_step(parameters: Float64Parameters, x: np.ndarray, y: np.ndarray) -> None:
    tensors = list(parameters.tensors.values())
    error = torch.from_numpy(x) @ torch.cat(tensors) - torch.from_numpy(y)
    gradients = torch.autograd.grad(0.5 * error.square().mean(), tensors)
    with torch.no_grad():
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.sub_(INNER_LR * gradient)


def simulate(outer_step: Callable[[np.ndarray, np.ndarray], np.ndarray], weight: str) -> list[np.ndarray]:
    """The same run in NumPy. outer_step: (anchor, merged delta) -> new anchor."""
    anchor = beginning()
    steps = [0] * len(PLANS)
    anchors = []
    for slot in range(SLOTS):
        deltas, counts = [], []
        for i, plan in enumerate(PLANS):
            local = anchor.copy()
            end = min((slot + 1) * plan.sync_every, plan.steps)
            counts.append((end - steps[i], (end - steps[i]) * plan.rows * 8))
            for step in range(steps[i], end):
                x, y = batch(i, step, plan.rows)
                local -= INNER_LR * x.T @ (x @ local - y) / plan.rows
            steps[i] = end
            deltas.append(anchor - local)
        anchor = outer_step(anchor, np.average(deltas, axis=0, weights=shares(counts, weight)))
        anchors.append(anchor)
    return anchors


class Nesterov:
    """DiLoCo's Algorithm 1 with the velocity kept in units of the parameters, another form of the same step."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum, self.velocity = lr, momentum, np.zeros(8)

    def __call__(self, anchor: np.ndarray, delta: np.ndarray) -> np.ndarray:
        before, self.velocity = self.velocity, self.momentum * self.velocity - self.lr * delta
        return anchor - self.momentum * before + (1 + self.momentum) * self.velocity


@pytest.mark.parametrize("weight", ["tokens", "steps", "equal"])
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_a_linear_model_trains_as_simulated_over_ten_slots(method, weight, tmp_path):
    case = Case(method, weight, lr=0.5, momentum=0.6)
    outer_step = (
        Nesterov(case.lr, case.momentum) if method == "diloco" else lambda anchor, delta: anchor - delta
    )
    ours, theirs = train_ours(tmp_path, case), simulate(outer_step, weight)
    assert len(ours) == SLOTS
    assert ours[0].dtype == np.float64
    moved = np.linalg.norm(theirs[-1] - beginning())
    assert moved > 0.5, "the model did not train"
    for slot, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        error = np.linalg.norm(mine - wanted) / np.linalg.norm(wanted)
        assert error < 1e-9, f"slot {slot}: relative error {error}"
