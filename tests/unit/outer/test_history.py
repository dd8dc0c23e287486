"""Whether two histories have parted, and which of them is the run's."""

import torch

from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.history import KEPT, MARK, has_more, have_parted, outranks
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.state import OuterState, combine

SIZE = 2
FRAGMENTS = tuple(
    fragment for i in range(2) for fragment in whole_model([TensorSpec(f"w{i}", (SIZE,), torch.float32)])
)


def founded(fragments: int = 1) -> OuterState:
    anchors = [torch.zeros(SIZE) for _ in range(fragments)]
    return OuterState.found(FRAGMENTS[:fragments], OuterSGD(0.7, 0.9, True), anchors)


def go_on(
    state: OuterState, slots: int, delta: float = 1.0, tokens: int = 10, islands: tuple[int, ...] = (0, 1)
):
    """So many slots more; the same state, for one expression."""
    for slot in range(state.slot, state.slot + slots):
        fragment = slot % len(state.states)
        advance = state.outer_step(fragment, slot)(Merged.of(torch.full((SIZE,), delta)))
        state.commit(slot, fragment, advance, list(islands), tokens, {}, {i: {} for i in islands})
    return state


def branch(state: OuterState, slots: int, **how) -> OuterState:
    return go_on(state.copy(), slots, **how)


def test_a_state_that_the_other_goes_on_from_has_not_parted_from_it():
    old = go_on(founded(2), 9)
    new = branch(old, 7)
    for one, other in ((old, new), (new, old), (old, old), (founded(2), new)):
        assert not have_parted(one.describe(), other.describe())


def test_histories_that_commit_the_same_slots_apart_have_parted_whatever_their_anchors():
    common = go_on(founded(), 900)
    a, b = branch(common, 100), branch(common, 101, islands=(1,))
    assert torch.equal(branch(common, 100, islands=(1,)).states[0].anchor, a.states[0].anchor)
    for one, other in ((a, b), (b, a), (branch(common, 1), branch(common, 1, islands=(1,)))):
        assert have_parted(one.describe(), other.describe())


def test_the_history_with_more_committed_tokens_is_the_run_s_though_the_other_has_more_slots():
    common = go_on(founded(), 5)
    a, b = branch(common, 3, tokens=20), branch(common, 4, tokens=10, islands=(1,))
    assert outranks(a.describe(), b.describe()) and not outranks(b.describe(), a.describe())
    assert has_more(a.describe(), b.describe()) and not has_more(a.describe(), a.describe())
    for mine, theirs in ((a, b), (b, a)):
        chosen = combine(mine.describe(), theirs.describe())
        assert chosen["fragments"] == a.describe()["fragments"]
        assert chosen["slot"] == 9, "nobody attempts a slot that has passed"


def test_of_equally_long_histories_everybody_picks_the_same():
    common = go_on(founded(), 5)
    a, b = branch(common, 3, islands=(0,)), branch(common, 3, islands=(1,))
    assert outranks(a.describe(), b.describe()) != outranks(b.describe(), a.describe())
    chosen = [combine(x.describe(), y.describe())["fragments"] for x, y in ((a, b), (b, a))]
    assert chosen[0] == chosen[1]


def test_fragments_of_two_histories_are_never_mixed():
    """Each is ahead in one fragment; without a fork the longer history of each would be taken."""
    common = go_on(founded(2), 4)
    a, b = branch(common, 1, tokens=30), branch(common, 2, tokens=10, islands=(1,))
    assert a.states[0].tokens > b.states[0].tokens and a.states[1].tokens < b.states[1].tokens
    chosen = combine(b.describe(), a.describe())
    assert chosen["fragments"] == a.describe()["fragments"]


def test_what_is_too_long_ago_to_compare_counts_as_parted_and_the_trail_stays_short():
    old = go_on(founded(), 3)
    for slots, forgotten in ((KEPT - 1, False), (KEPT, True)):
        new = branch(old, slots)
        assert have_parted(old.describe(), new.describe()) == forgotten
        assert len(new.states[0].trail) <= KEPT * MARK


def test_states_of_earlier_versions_without_a_trail_are_read_and_compared_by_their_last_version():
    state = go_on(founded(), 3)
    described = state.describe()
    for entry in described["fragments"]:
        del entry["trail"]
    again = founded()
    again.restore(described, state.tensors())
    assert again.states[0].trail == ""
    assert not have_parted(described, state.describe())
    assert have_parted(described, branch(state, 1).describe()) is False
    assert have_parted(described, branch(go_on(founded(), 2), 1, islands=(1,)).describe())
