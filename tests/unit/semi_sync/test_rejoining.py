"""What an island holds, sends and is worth once it has come back, or has come late, over the in-memory network."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.histories import BOTH, Learner, network, together
from torchtitan_diloco.config.own import OuterConfig, SemiSyncConfig

MEAN = OuterConfig(lr=1.0, momentum=0.0, nesterov=False)


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach() for parameter in learner.model.parameters()])


def anchor(learner: Learner) -> torch.Tensor:
    return torch.cat([held.anchor for held in learner.outer.states])


def lost(learner: Learner) -> None:
    """Killed: nobody is told, and nothing is saved."""
    learner.turns.net.crash(learner.island)
    learner.turns.net.run(5.0)


def test_fr_12_without_checkpoints_an_island_that_was_killed_takes_the_others_state(tmp_path: Path) -> None:
    """Nothing of it is on any disk: it comes back as a fresh one, with other weights."""
    turns = network()
    a, b = (Learner(i, tmp_path, turns, drift=1.0 + i) for i in BOTH)
    a.join()
    b.join()
    turns.net.run(1.0)
    together(turns, partial(a.train, 2), partial(b.train, 2))
    lost(b)
    together(turns, partial(a.train, 4))
    again = Learner(1, tmp_path, turns, value=77.0, drift=2.0, incarnation="second")
    again.join()
    turns.net.run(1.0)
    assert torch.equal(parameters(again), anchor(a))
    together(turns, partial(a.train, 6), partial(again.train, 6))
    assert torch.equal(parameters(again), parameters(a))
    assert again.outer.describe() == a.outer.describe()
    assert again.events("round")[-1]["participants"] == [0, 1]


@pytest.mark.parametrize("fragments", [1, 2])
def test_fr_33_a_heal_takes_weights_anchor_momentum_and_counters_and_the_next_round_is_the_source_s(
    fragments: int, tmp_path: Path
) -> None:
    turns = network()
    config = SemiSyncConfig(sync_every=fragments, fragments=fragments, num_islands=3)
    a, b, c = (Learner(i, tmp_path, turns, value=float(i), drift=1.0 + i, config=config) for i in range(3))
    for learner in (a, b):
        learner.join()
    turns.net.run(1.0)
    together(turns, partial(a.train, 4 * fragments), partial(b.train, 4 * fragments))
    c.join()
    turns.net.run(1.0)
    for name, tensor in a.outer.tensors().items():
        assert torch.equal(c.outer.tensors()[name], tensor), name
    assert any(name.startswith("momentum") and tensor.any() for name, tensor in c.outer.tensors().items())
    assert c.outer.describe() == a.outer.describe()
    assert torch.equal(parameters(c), anchor(a)), "the model trains on what the anchor is"
    assert c.step == a.step and c.method.next_slot == a.method.next_slot
    assert c.method.steps == c.method.tokens == [0] * fragments
    ends = 6 * fragments
    together(turns, *(partial(learner.train, ends) for learner in (a, b, c)))
    assert c.events("round")[-1]["participants"] == [0, 1, 2]
    for other in (b, c):
        assert other.outer.describe() == a.outer.describe()
        for name, tensor in a.outer.tensors().items():
            assert torch.equal(other.outer.tensors()[name], tensor), name
    assert torch.equal(parameters(c), parameters(a)) or fragments > 1


def test_fr_54_an_island_that_comes_within_a_window_contributes_its_own_steps_weighted_by_its_tokens(
    tmp_path: Path,
) -> None:
    """H = 8, and B comes when A is at step 3, with other weights: never A's steps a second time, never its own start."""
    turns = network()
    config = SemiSyncConfig(sync_every=8, num_islands=2, outer=MEAN)
    a = Learner(0, tmp_path, turns, value=1.0, drift=0.25, tokens=10, config=config)
    b = Learner(1, tmp_path, turns, value=50.0, drift=-0.5, tokens=20, config=config)
    a.join()
    turns.net.run(1.0)
    together(turns, partial(a.train, 3))
    b.join()
    turns.net.run(1.0)
    assert b.step == 3
    assert torch.equal(parameters(b), torch.ones(6)), "it begins where A began, not where A is"
    together(turns, partial(a.train, 8), partial(b.train, 8))
    assert b.steps == [4, 5, 6, 7, 8]
    (first,) = a.events("round")
    assert first["participants"] == [0, 1] and first["tokens"] == 8 * 10 + 5 * 20
    own, other = 80**2 / 8, 100**2 / 5  # tokens^2 / steps
    assert first["weights"] == pytest.approx([own / (own + other), other / (own + other)])
    moved = (own * 8 * 0.25 + other * 5 * -0.5) / (own + other)
    torch.testing.assert_close(anchor(a), torch.full((6,), 1.0 + moved))
    assert torch.equal(anchor(a), anchor(b))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("poisoned", BOTH)
def test_fr_26_a_nan_of_one_island_reaches_no_other_and_all_decide_alike(
    poisoned: int, fragments: int, tmp_path: Path
) -> None:
    """H = 4; island B's weights are NaN after its step 6. Its contribution is dropped, and it goes on from the anchor."""
    turns = network()
    config = SemiSyncConfig(sync_every=4, fragments=fragments, num_islands=2, outer=MEAN)
    learners = [Learner(i, tmp_path, turns, drift=1.0 + i, config=config) for i in BOTH]
    for learner in learners:
        learner.join()
    turns.net.run(1.0)

    def poison() -> None:
        b = learners[poisoned]
        b.train(5)
        with torch.no_grad():
            next(b.model.parameters())[0] = torch.nan
        b.train(20)

    healthy = 1 - poisoned
    calls = [partial(learners[healthy].train, 20), poison]
    together(turns, *calls)
    rounds = [{e["round"]: e for e in learner.events("round")} for learner in learners]
    assert rounds[0].keys() == rounds[1].keys() and len(rounds[0]) >= 4
    for slot, event in rounds[0].items():
        other = rounds[1][slot]
        assert event["committed"] and other["committed"]
        assert (event["participants"], event["digest"]) == (other["participants"], other["digest"])
    without = [slot for slot, event in rounds[0].items() if event["participants"] == [healthy]]
    # With two fragments, of which the first is sent at step 6, the second has to be thrown away with it.
    assert 1 <= len(without) <= fragments
    assert list(rounds[0].values())[-1]["participants"] == [0, 1], "it is back with the others"
    for learner in learners:
        assert torch.isfinite(anchor(learner)).all() and torch.isfinite(parameters(learner)).all()
