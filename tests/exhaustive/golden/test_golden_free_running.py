"""Whole runs, inner training included, against a NumPy simulation of all of it, in float64."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.island import Case, Plan
from tests.golden.reference import Outer, schedule, shares
from tests.golden.turns import Turns, TurnsTransport
from torchtitan_diloco.exchange.memory import MemoryNet
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.outer.fragments import Fragment, TensorSpec
from torchtitan_diloco.outer.merge import Contribution, Merged, Weight, mean
from torchtitan_diloco.outer.values import Flat, Strung, Values, whole
from torchtitan_diloco.semi_sync import Setup, make_method
from torchtitan_diloco.semi_sync.diloco import DiLoCo, Flight

WINDOWS = 10
SIZES = {
    f"w.{i}": size for i, size in enumerate([2, 1, 2, 1, 1, 2, 1, 2])
}  # the linear model's weights, by tensor
WIDTH = sum(SIZES.values())
INNER_LR = 0.05
ROW = 8  # tokens

Anchors = list[list[np.ndarray]]
"""By fragment, its values after each committed slot."""


def batch(island: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (rows, WIDTH) and targets (rows,) of a linear law that differs a little between islands."""
    law = np.linspace(-1.0, 1.0, WIDTH) + 0.2 * np.sin(np.arange(WIDTH) + island)
    x = np.random.default_rng([island, step]).normal(size=(rows, WIDTH))
    return x, x @ law


def beginning() -> np.ndarray:
    return np.random.default_rng(7).normal(size=WIDTH)


class Float64Parameters:
    """In place of IslandParameters, which always exchanges float32."""

    def __init__(self) -> None:
        parts = np.split(beginning(), np.cumsum(list(SIZES.values()))[:-1])
        self.tensors = {
            name: torch.tensor(part, requires_grad=True) for name, part in zip(SIZES, parts, strict=True)
        }
        self.specs = {name: TensorSpec(name, (size,), torch.float64) for name, size in SIZES.items()}

    def present(self, fragment: Fragment) -> Strung:
        return Flat(fragment.flatten({name: t.detach() for name, t in self.tensors.items()}, torch.float64))

    @torch.no_grad()
    def scatter(self, fragment: Fragment, flat: torch.Tensor, alpha: float = 0.0) -> None:
        for piece, values in fragment.views(flat):
            held = self.tensors[piece.spec.name][piece.start : piece.stop]
            held.copy_(alpha * held + (1 - alpha) * values)


class Float64Plan:
    """In place of a codec's plan: deltas travel as they are."""

    dtype = torch.float64
    in_place = False

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def sum_by_pieces(
        self, payloads: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor
    ) -> Iterator[slice]:
        torch.mul(payloads[0], shares[0], out=out)
        for payload, share in zip(payloads[1:], shares[1:], strict=True):
            out += payload * share
        yield slice(0, self.numel)


class Float64Wire:
    """In place of Wire, whose codecs know float32 only; the merge is the production one, and nothing is cut."""

    def __init__(self, fragments: Sequence[Fragment], weight: Weight) -> None:
        self.merge = self
        self.plans = [Float64Plan(fragment.numel) for fragment in fragments]
        self.weight = weight

    def encode(self, fragment: int, slot: int, delta: Values) -> torch.Tensor:
        return whole(delta)

    def settle(self, fragment: int, slot: int, committed: bool, counted: bool) -> None:
        pass

    def reset(self, fragment: int) -> None:
        pass

    def sizes(self, fragment: int) -> tuple[int, ...]:
        return (8 * self.plans[fragment].numel,)

    def __call__(self, fragment: int, contributions: Sequence[Contribution]) -> tuple[Merged, list[float]]:
        return mean(contributions, self.weight, self.plans[fragment])  # type: ignore[arg-type]


def train_ours(folder: Path, case: Case, plans: Sequence[Plan]) -> tuple[Anchors, list[np.ndarray]]:
    """Anchors, and each island's positions in the flat weights by fragment, of islands that run the production method."""
    turns = Turns(MemoryNet())
    methods: list[DiLoCo] = []
    for i, plan in enumerate(plans):
        setup = Setup(
            config=case.config(plan, len(plans)),
            steps=plan.steps,
            island=i,
            incarnation="only",
            started=float(i),
            run_id="toy",
            group=IslandGroup(),
            parameters=Float64Parameters(),  # type: ignore[arg-type]
            trace=Trace(folder / f"island-{i}", i, "only"),
            drain=DrainFlag(),
            make_transport=partial(TurnsTransport, net=turns.net, turns=turns),
        )
        method = make_method(setup)
        method.wire = Float64Wire(method.fragments, setup.config.merge.weight)
        assert isinstance(method, DiLoCo)
        methods.append(method)
        method.join(0)
    turns.net.run(1.0)
    anchors: Anchors = [[] for _ in range(case.fragments)]

    def poll(flight: Flight, timeout_s: float = 0.0) -> Outcome | None:
        """The first island's, keeping every anchor."""
        outcome = DiLoCo.poll(methods[0], flight, timeout_s)
        if outcome is not None and outcome.status == "committed":
            assert methods[0].outer is not None
            anchors[flight.fragment].append(methods[0].outer.states[flight.fragment].anchor.numpy())
        return outcome

    methods[0].poll = poll  # type: ignore[method-assign]

    def train(island: int) -> None:
        plan, method = plans[island], methods[island]
        for step in range(plan.steps):
            inner_step(method.parameters, *batch(island, step, plan.rows))  # type: ignore[arg-type]
            assert method.after_inner_step(step + 1, plan.rows * ROW) == step + 1

    turns.run([partial(train, island) for island in range(len(plans))])
    for method in methods:
        assert method.outer is not None and methods[0].outer is not None
        assert method.outer.describe()["fragments"] == methods[0].outer.describe()["fragments"]
        method.leave("done")
    starts = dict(zip(SIZES, np.cumsum([0, *SIZES.values()])[:-1], strict=True))
    positions = [
        np.concatenate([starts[p.spec.name] + np.arange(p.start, p.stop) for p in fragment.pieces])
        for fragment in methods[0].fragments
    ]
    return anchors, positions


def inner_step(parameters: Float64Parameters, x: np.ndarray, y: np.ndarray) -> None:
    tensors = list(parameters.tensors.values())
    error = torch.from_numpy(x) @ torch.cat(tensors) - torch.from_numpy(y)
    gradients = torch.autograd.grad(0.5 * error.square().mean(), tensors)
    with torch.no_grad():
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.sub_(INNER_LR * gradient)


class Learner:
    """One island of the simulation."""

    def __init__(self, number: int, plan: Plan, outer: Outer) -> None:
        self.number, self.plan, self.outer = number, plan, outer
        self.local = beginning()
        self.step = 0
        self.applied = [0] * outer.fragments  # step at which each fragment was last applied
        self.turns = schedule(plan.sync_every, plan.steps, outer)

    def train_to(self, step: int) -> None:
        for s in range(self.step, step):
            x, y = batch(self.number, s, self.plan.rows)
            self.local -= INNER_LR * x.T @ (x @ self.local - y) / self.plan.rows
        self.step = max(self.step, step)


def simulate(outer: Outer, plans: Sequence[Plan], positions: Sequence[np.ndarray]) -> Anchors:
    """The same run in NumPy: slot after slot; an island applies what is due on its way to the next send.

    Nesterov's velocity is kept in units of the parameters, another form of the same step.
    """
    learners = [Learner(i, plan, outer) for i, plan in enumerate(plans)]
    anchor = beginning()
    velocity = np.zeros(WIDTH)
    anchors: Anchors = [[] for _ in positions]
    merged: dict[int, np.ndarray] = {}  # slot -> new anchor of its fragment, not applied by everybody yet

    def apply_until(learner: Learner, slot: int, step: int) -> None:
        """Train to ``step``, applying earlier slots on the way, those of ``step`` itself included."""
        for turn in learner.turns[:slot]:
            if learner.step <= turn.applied <= step and turn.slot in pending[learner.number]:
                learner.train_to(turn.applied)
                pending[learner.number].discard(turn.slot)
                if turn.slot in merged:
                    where = positions[turn.fragment]
                    mixed = outer.alpha * learner.local[where] + (1 - outer.alpha) * merged[turn.slot]
                    learner.local[where] = mixed
                    learner.applied[turn.fragment] = turn.applied
        learner.train_to(step)

    pending: list[set[int]] = [set() for _ in plans]
    for slot in range(len(learners[0].turns)):
        where = positions[slot % outer.fragments]
        deltas, counts = [], []
        for learner in learners:
            turn = learner.turns[slot]
            apply_until(learner, slot, turn.sent)
            pending[learner.number].add(slot)
            steps = turn.sent - learner.applied[turn.fragment]
            if steps > 0:
                deltas.append(anchor[where] - learner.local[where])
                counts.append((steps, steps * learner.plan.rows * ROW))
        if deltas:
            delta = np.average(deltas, axis=0, weights=shares(counts, outer.weight))
            before = velocity[where]
            velocity[where] = outer.momentum * before - outer.lr * delta
            ahead = (1 + outer.momentum) * velocity[where] - outer.momentum * before
            anchor[where] += ahead if outer.nesterov else velocity[where]
            merged[slot] = anchor[where].copy()
            anchors[slot % outer.fragments].append(merged[slot])
        for learner in learners:
            if learner.turns[slot].applied == learner.turns[slot].sent:
                apply_until(learner, slot + 1, learner.turns[slot].sent)
    return anchors


def compare(folder: Path, case: Case, plans: Sequence[Plan]) -> None:
    ours, positions = train_ours(folder, case, plans)
    assert sorted(np.concatenate(positions)) == list(range(WIDTH))
    theirs = simulate(case.outer(), plans, positions)
    for f, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(wanted) >= WINDOWS
        assert mine[0].dtype == np.float64
        assert np.linalg.norm(wanted[-1] - beginning()[positions[f]]) > 0.1, "the model did not train"
        for slot, (a, b) in enumerate(zip(mine, wanted, strict=True)):
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert error < 1e-9, f"fragment {f}, its slot {slot}: relative error {error}"


@pytest.mark.parametrize("weight", ["tokens", "steps", "equal"])
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_a_linear_model_trains_as_simulated_over_ten_slots(method, weight, tmp_path):
    plans = [
        Plan(7, 7 * WINDOWS - 3, rows=4),
        Plan(4, 4 * WINDOWS, rows=6),
        Plan(9, 9 * WINDOWS - 8, rows=3),
    ]
    compare(tmp_path, Case(method, weight, lr=0.5, momentum=0.6), plans)


STREAMING = [
    Plan(8, 8 * WINDOWS + 1, rows=4),
    Plan(10, 10 * WINDOWS + 1, rows=6),
    Plan(9, 9 * WINDOWS + 1, rows=3),
]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [0, 1, 3, 7])
def test_streaming_in_four_fragments_trains_as_simulated_over_ten_windows(overlap, alpha, tmp_path):
    compare(tmp_path, Case(lr=0.5, momentum=0.6, fragments=4, overlap=overlap, alpha=alpha), STREAMING)


@pytest.mark.parametrize("islands", [2, 5])
def test_streaming_in_as_many_fragments_as_steps_trains_as_simulated(islands, tmp_path):
    plans = [Plan(8, 8 * WINDOWS + 3, rows=rows) for rows in (2, 3, 1, 1, 2)]
    compare(tmp_path, Case(lr=0.5, momentum=0.6, fragments=8, overlap=2), plans[:islands])
