"""What broke for people who do this, as it must come out here. Over the in-memory network."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.compare import read_send, rounds
from tests.golden.island import Case, Island, Plan
from tests.golden.reference import flatten, replay
from tests.golden.turns import Crashed, Turns, TurnsTransport
from tests.helpers.methods import method_of
from torchtitan_diloco.checkpoint.manager import read_outer, write_outer
from torchtitan_diloco.config.own import MergeConfig, OuterConfig, SemiSyncConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.memory import Boundary, Fate, MemoryNet
from torchtitan_diloco.exchange.messages import Announce
from torchtitan_diloco.semi_sync.diloco import DiLoCo

ULP = 2.0**-8  # of bfloat16 between 0.5 and 1


class Bare(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


Move = Callable[[int, int, nn.Module], None]
"""What an inner step does: (island, step, model)."""


def train(
    folder: Path,
    models: Sequence[nn.Module],
    config: SemiSyncConfig,
    steps: range,
    move: Move,
    *,
    script: Callable[[Boundary], Fate] | None = None,
    end: int = 1000,
) -> list[DiLoCo]:
    """One island per model through ``steps``."""
    turns = Turns(MemoryNet(script))
    methods = [
        method_of(
            model, config, folder, partial(TurnsTransport, net=turns.net, turns=turns), island=i, steps=end
        )
        for i, model in enumerate(models)
    ]
    for method in methods:
        method.join(0)
    turns.net.run(1.0)
    turns.run([partial(go_on, i, models[i], methods[i], steps, move) for i in range(len(models))])
    return methods


@torch.no_grad()
def go_on(island: int, model: nn.Module, method: DiLoCo, steps: range, move: Move) -> None:
    for step in steps:
        move(island, step, model)
        method.after_inner_step(step, 10)


def test_fr31_the_anchor_of_bfloat16_parameters_follows_the_float32_reference(tmp_path):
    """A norm weight of 1.0, of which one island in four leaves by one ulp a window: 1e-3 in the mean, below bfloat16's."""
    config = SemiSyncConfig(sync_every=1, num_islands=4, merge=MergeConfig(weight="equal"))
    models = [Bare({"norm": torch.ones(16, dtype=torch.bfloat16)}) for _ in range(4)]

    def move(island: int, step: int, model: nn.Module) -> None:
        if step % 4 == island:
            model.norm.sub_(ULP)

    methods = train(tmp_path, models, config, range(1, 21), move)
    anchor, velocity = np.ones(16), np.zeros(16)
    for _ in range(20):
        velocity = 0.9 * velocity + ULP / 4
        anchor -= 0.7 * (0.9 * velocity + ULP / 4)
    assert 0.85 < anchor[0] < 0.95
    for model, method in zip(models, methods, strict=True):
        assert method.outer is not None
        (state,) = method.outer.states
        assert state.version == 20
        assert state.anchor.dtype == state.momentum.dtype == torch.float32
        np.testing.assert_allclose(state.anchor.numpy(), anchor, rtol=0, atol=1e-6)
        assert torch.equal(model.norm, state.anchor.bfloat16())


def test_fr31_the_float32_anchor_survives_save_and_resume_bit_for_bit(tmp_path):
    config = SemiSyncConfig(sync_every=1)
    drift = lambda island, step, model: model.norm.sub_(ULP * (step % 2))
    straight, stopped, resumed = (Bare({"norm": torch.ones(16, dtype=torch.bfloat16)}) for _ in range(3))
    (whole,) = train(tmp_path / "whole", [straight], config, range(1, 21), drift)
    (first,) = train(tmp_path / "first", [stopped], config, range(1, 11), drift)
    write_outer(tmp_path / "step-10", *first.state())
    resumed.load_state_dict(stopped.state_dict())
    turns = Turns(MemoryNet())
    second = method_of(
        resumed, config, tmp_path / "second", partial(TurnsTransport, net=turns.net, turns=turns)
    )
    saved = read_outer(tmp_path / "step-10")
    assert saved is not None
    second.restore(*saved)
    for name, tensor in first.state()[1].items():
        assert torch.equal(second.state()[1][name], tensor)
    assert second.join(10) == 10
    turns.net.run(1.0)
    turns.run([lambda: go_on(0, resumed, second, range(11, 21), drift)])
    assert second.outer.describe() == whole.outer.describe()
    for name, tensor in whole.state()[1].items():
        assert torch.equal(second.state()[1][name], tensor)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    "sizes", [[6, 6, 6], [20, 3], [1000, 1, 1, 7], [1, 2, 3, 50]], ids=lambda s: "-".join(map(str, s))
)
def test_fr34_all_parameters_are_equal_after_a_round_whatever_their_sizes(sizes, fragments, tmp_path):
    """Nothing is packed into buckets of a capacity, from which tensors could fall out."""
    config = SemiSyncConfig(sync_every=3, fragments=fragments, num_islands=2)
    models = [Bare({f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}) for _ in range(2)]

    def move(island: int, step: int, model: nn.Module) -> None:
        if island == 1:
            for parameter in model.parameters():
                parameter.add_(1.0)

    train(tmp_path, models, config, range(1, 4), move, end=3)
    for name, parameter in models[0].named_parameters():
        assert (parameter != 0).all(), f"{name} was not exchanged"
        assert torch.equal(parameter, models[1].get_parameter(name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drops", [False, True])
def test_fr61_the_mean_of_1_and_3_is_2_also_when_a_third_island_has_dropped(drops, dtype, tmp_path):
    """Local SGD: the divisor is the number of those who took part. The third held 100."""
    values = [1.0, 3.0, 100.0] if drops else [1.0, 3.0]
    config = SemiSyncConfig(
        method="local_sgd", sync_every=1, num_islands=len(values), merge=MergeConfig(weight="equal")
    )
    models = [Bare({"w": torch.zeros(5, dtype=dtype)}) for _ in values]

    def lose_the_third(boundary: Boundary) -> Fate:
        leaves = boundary.sender == 2 and boundary.kind == "message"
        return Fate(crash=(2,), crash_first=True) if leaves else Fate()

    def move(island: int, step: int, model: nn.Module) -> None:
        model.w.fill_(values[island])

    turns = Turns(MemoryNet(lose_the_third))
    methods = [
        method_of(model, config, tmp_path, partial(TurnsTransport, net=turns.net, turns=turns), island=i)
        for i, model in enumerate(models)
    ]
    for method in methods:
        method.join(0)
    turns.net.run(1.0)

    def until_the_end(island: int) -> None:
        try:
            go_on(island, models[island], methods[island], range(1, 2), move)
        except Crashed:
            assert island == 2

    turns.run([partial(until_the_end, i) for i in range(len(values))])
    for island in (0, 1):
        (event,) = rounds(tmp_path / f"island-{island}")
        assert event["participants"] == [0, 1] and event["weights"] == [0.5, 0.5]
        assert torch.equal(models[island].w, torch.full((5,), 2.0, dtype=dtype))


def test_fr32_an_island_that_dies_after_sending_comes_back_to_the_same_fragments(tmp_path):
    """Two fragments, tau 1: island 1 dies on announcing slot 1, restarts, and takes part again; as the reference."""
    case, plan = Case(fragments=2, overlap=1), Plan(4, 21)
    dead: list[int] = []

    def kill(boundary: Boundary) -> Fate:
        announces = isinstance(boundary.message, Announce) and boundary.slot == 1
        if announces and boundary.sender == 1 and not dead:
            dead.append(1)
            return Fate(crash=(1,), crash_first=True)
        return Fate()

    turns = Turns(MemoryNet(kill))

    def start(number: int) -> Island:
        make_transport = lambda merge: TurnsTransport(merge, turns.net, turns=turns)
        return Island(number, plan, case, tmp_path, make_transport, islands=2)

    first, second = start(0), start(1)
    first.join()
    second.join()
    turns.net.run(1.0)

    def die_and_come_back() -> None:
        with pytest.raises(Crashed):
            second.train()
        for _ in range(30):
            turns.hand_over()
        again = start(1)
        again.join()
        assert again.step > 0
        again.train()
        again.finish()

    turns.run([first.train, die_and_come_back])
    first.finish()
    assert dead == [1]
    events = [rounds(tmp_path / f"island-{i}") for i in range(2)]
    assert all(event["fragment"] == event["round"] % 2 for both in events for event in both)
    mine = {event["round"]: event for event in events[0]}
    assert mine[1]["participants"] == [0]
    together = [
        event["round"] for event in events[1] if event["committed"] and event["participants"] == [0, 1]
    ]
    assert len([slot for slot in together if slot > 1]) >= 6
    for event in events[1]:
        assert event["digest"] == mine[event["round"]]["digest"]

    sends = {
        slot: {
            i: read_send(tmp_path / f"island-{i}" / "sends" / f"slot-{slot:06d}.safetensors")
            for i in event["participants"]
        }
        for slot, event in mine.items()
        if event["committed"]
    }
    founding = read_founding(tmp_path / "island-0" / "sends", sends)
    results = replay(founding, sorted(sends.items()), case.outer())
    assert [r.digest for r in results] == [e["digest"] for e in events[0] if e["committed"]]


def read_founding(folder: Path, sends: dict) -> list[np.ndarray]:
    from safetensors.numpy import load_file

    founding = load_file(folder / "founding.safetensors")
    parts = {send.fragment: list(send.parameters) for sent in sends.values() for send in sent.values()}
    return [flatten({name: founding[name] for name in parts[f]}) for f in sorted(parts)]


def test_fr32_any_number_of_fragments_up_to_h_and_any_overlap_below_h_runs(tmp_path):
    for h in range(1, 5):
        for fragments in range(1, h + 1):
            for overlap in range(h):
                config = SemiSyncConfig(
                    sync_every=h,
                    fragments=fragments,
                    overlap=overlap,
                    num_islands=2,
                    outer=OuterConfig(lr=0.5, momentum=0.0),
                )
                models = [Bare({f"p{i}": torch.zeros(3) for i in range(4)}) for _ in range(2)]
                move = lambda island, step, model: [p.add_(1.0 + island) for p in model.parameters()]
                name = tmp_path / f"{h}-{fragments}-{overlap}"
                methods = train(name, models, config, range(1, 3 * h + 1), move, end=3 * h)
                assert methods[0].outer is not None and methods[1].outer is not None
                assert methods[0].outer.describe() == methods[1].outer.describe()
                assert all(state.version >= 2 for state in methods[0].outer.states)
                assert methods[0].outer.slot == (3 * h - 1) * fragments // h + fragments


@pytest.mark.parametrize(
    "lists, message",
    [
        ([["p0"], ["p1"]], "semi_sync.module_fqns_per_fragment: p2 is in no fragment"),
        ([["p0", "p1"], ["p1", "p2"]], r"semi_sync.module_fqns_per_fragment: p1 is in fragments \[0, 1\]"),
    ],
)
def test_fr32_fragments_that_overlap_or_miss_a_parameter_are_refused(lists, message, tmp_path):
    model = Bare({f"p{i}": torch.zeros(3) for i in range(3)})
    with pytest.raises(UserError, match=message):
        method_of(model, SemiSyncConfig(module_fqns_per_fragment=lists), tmp_path, MemoryNet)


def test_fr35_slots_that_fail_for_ever_end_the_island_with_the_reason(tmp_path):
    """Counted in a row: one that commits in between, and one without a step to merge, count for nothing."""
    config = SemiSyncConfig(sync_every=1, num_islands=1, max_failed_slots=3)
    bad = {2, 3, 5, 6, 7, 8}

    def move(island: int, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.fill_(torch.nan if step in bad else 1.0)

    with pytest.raises(
        UserError, match=r"semi_sync.max_failed_slots = 3: .* because no delta is finite; remove"
    ):
        train(tmp_path, [Bare({"p": torch.zeros(3)})], config, range(1, 11), move)
    found = {event["round"]: event["committed"] for event in rounds(tmp_path / "island-0")}
    assert found == {0: True, 1: False, 2: False, 3: True, 4: False, 5: False, 6: False}


def test_fr35_without_a_limit_they_may_fail_for_as_long_as_they_like(tmp_path):
    config = SemiSyncConfig(sync_every=1, num_islands=1, max_failed_slots=0)
    move = lambda island, step, model: [p.fill_(torch.nan) for p in model.parameters()]
    train(tmp_path, [Bare({"p": torch.zeros(3)})], config, range(1, 51), move)
    assert len(rounds(tmp_path / "island-0")) == 50
