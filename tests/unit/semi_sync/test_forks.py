"""Two histories of one run meet: one goes on, the other is put aside and named, and they are never mixed."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers import event_schema
from tests.helpers.histories import BOTH, Learner, go_on, network, together
from torchtitan_diloco.checkpoint.manager import read_outer
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.outer.state import OuterState


def assert_equal(*learners: Learner) -> None:
    first = learners[0]
    for other in learners[1:]:
        assert other.outer.describe() == first.outer.describe()
        for name, tensor in first.outer.tensors().items():
            assert torch.equal(tensor, other.outer.tensors()[name])


def assert_put_aside(loser: Learner, lost: OuterState) -> None:
    """What the loser held can be had whole, and an event and a sentence say where."""
    (folder,) = loser.forks()
    saved = read_outer(folder)
    assert saved is not None
    description, tensors = saved
    assert description["outer"] == lost.describe()
    for name, tensor in lost.tensors().items():
        assert torch.equal(tensors[name], tensor)
    (event,) = loser.events("error")
    assert event["kind"] == "fork" and str(folder) in event["message"]
    assert (
        f"island {loser.island} holds a history (slot {lost.slot}, {lost.tokens_total} " in event["message"]
    )
    assert event_schema.problems([event]) == []


@pytest.mark.parametrize(
    "durable, each, wins",
    [(1000, 20, "A"), (940, 20, "B"), (1010, 1, "B")],
    ids=["A", "B", "B-with-fewer-slots"],
)
def test_b_goes_on_from_slot_900_while_a_which_was_further_is_away(
    durable: int, each: int, wins: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A is queued; until slot 1001 B trains alone, so its slots hold half the tokens that theirs had together."""
    turns = network()
    b = Learner(1, tmp_path, turns, incarnation="second")
    common = b.fresh()
    go_on(common, 900, tokens=20)
    b.restore(common)
    b.join()
    turns.net.run(1.0)
    together(turns, partial(b.train, 1001))
    assert b.outer.slot == 1001
    alone = b.outer.copy()

    a = Learner(0, tmp_path, turns, incarnation="second")
    theirs = common.copy()
    go_on(theirs, durable - 900, tokens=each)
    a.restore(theirs)
    a.join()
    turns.net.run(1.0)
    winner, loser, lost = (a, b, alone) if wins == "A" else (b, a, theirs)
    together(turns, partial(a.train, 1006), partial(b.train, 1006))
    assert_put_aside(loser, lost)
    assert f"island {loser.island} holds a history" in caplog.text
    assert winner.forks() == [] and winner.events("error") == winner.events("heal") == []
    # The slot in which a running island learns of it commits without it, and is a second one.
    assert len(loser.events("heal")) in ((1, 2) if loser is b else (1,))
    assert_equal(a, b)
    kept = (theirs if wins == "A" else alone).tokens_total
    assert kept < a.outer.tokens_total <= kept + 6 * 20, "no token of the other history counts"
    last = a.events("round")[-1]
    assert last["committed"] and last["participants"] == [0, 1]


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("apart", [(3, 3), (3, 5), (5, 3)], ids=str)
@pytest.mark.parametrize("tokens", [(10, 30), (30, 10), (10, 10)], ids=str)
def test_fr_37_after_a_partition_the_history_with_more_tokens_goes_on_and_the_other_is_kept(
    tokens: tuple[int, int], apart: tuple[int, int], fragments: int, tmp_path: Path
) -> None:
    """Both sides commit by themselves, each for so many slots, and then reach one another again."""
    home, elsewhere = network(), network()
    config = SemiSyncConfig(sync_every=fragments, fragments=fragments, num_islands=2)
    a, b = (Learner(i, tmp_path, home, tokens=tokens[i], config=config) for i in BOTH)
    for learner in (a, b):
        learner.join()
    home.net.run(1.0)
    together(home, partial(a.train, 4 * fragments), partial(b.train, 4 * fragments))
    assert_equal(a, b)
    b.move(elsewhere)
    together(home, partial(a.train, (4 + apart[0]) * fragments))
    together(elsewhere, partial(b.train, (4 + apart[1]) * fragments))
    totals = [learner.outer.tokens_total for learner in (a, b)]
    before = [learner.outer.copy() for learner in (a, b)]
    assert before[0].lineage != before[1].lineage
    b.move(home)
    together(home, partial(a.train, 14 * fragments), partial(b.train, 14 * fragments))
    assert_equal(a, b)
    losers = [learner for learner in (a, b) if learner.forks()]
    assert len(losers) == 1, "exactly one history is put aside"
    (loser,) = losers
    if totals[0] != totals[1]:
        assert loser.island == (0 if totals[0] < totals[1] else 1)
    if fragments == 1:
        assert_put_aside(loser, before[loser.island])
    assert a.events("round")[-1]["participants"] == [0, 1]


def test_an_island_that_was_merely_away_heals_and_nothing_is_put_aside(tmp_path: Path) -> None:
    turns = network()
    a, b = (Learner(i, tmp_path, turns) for i in BOTH)
    state = a.fresh()
    go_on(state, 20, tokens=20)
    b.restore(state)
    go_on(state, 30, tokens=10, islands=(0,))
    a.restore(state)
    a.join()
    b.join()
    assert len(b.events("heal")) == 1 and b.events("error") == b.forks() == []
    assert_equal(a, b)


def test_the_newest_checkpoint_of_the_lost_history_is_kept_with_it_and_survives_pruning(
    tmp_path: Path,
) -> None:
    turns = network()
    a, b = (Learner(i, tmp_path, turns) for i in BOTH)
    state = a.fresh()
    go_on(state, 20, tokens=20)
    other = state.copy()
    go_on(other, 2, tokens=10, islands=(1,))
    go_on(state, 5, tokens=20, islands=(0,))
    a.restore(state)
    b.restore(other)
    for step, whole in ((18, True), (22, True), (23, False)):
        folder = tmp_path / "island-1" / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_text(f"weights of {step}")
        if whole:
            (folder / ".metadata").write_text("that is all")
    a.join()
    b.join()
    (kept,) = b.forks()
    pruned = tmp_path / "island-1" / "checkpoint" / "step-22"
    for file in pruned.iterdir():
        file.unlink()
    assert sorted(path.name for path in kept.iterdir()) == ["outer.json", "outer.safetensors", "step-22"]
    assert (kept / "step-22" / "__0_0.distcp").read_text() == "weights of 22"


def test_a_history_that_cannot_be_kept_is_not_given_up(tmp_path: Path) -> None:
    turns = network()
    a, b = (Learner(i, tmp_path, turns) for i in BOTH)
    state = a.fresh()
    go_on(state, 3, tokens=20)
    other = a.fresh()
    go_on(other, 2, tokens=10, islands=(1,))
    a.restore(state)
    b.restore(other)
    (tmp_path / "island-1" / "forks").write_text("in the way")
    a.join()
    with pytest.raises(
        UserError, match=r"island 1 has a history of its own, .* make room there \(job.dump_folder\)"
    ):
        b.join()
