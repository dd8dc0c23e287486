"""The outer state that islands share."""

import torch

from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.state import OuterState


def committed(*members: int) -> OuterState:
    """After a slot to which island 1 alone contributed."""
    state = OuterState.found(
        whole_model([TensorSpec("w", (3,), torch.float32)]), OuterSGD(0.7, 0.9, True), [torch.zeros(3)]
    )
    advance = state.outer_step(0, 0)(Merged.of(torch.ones(3)))
    state.commit(0, 0, advance, [1], 10, {"a/1": 4}, {island: {"a": "0-4"} for island in members})
    return state


def test_the_same_anchor_committed_by_other_members_is_another_history() -> None:
    both, alone = committed(0, 1), committed(1)
    assert both.states[0].digest == alone.states[0].digest
    assert both.lineage != alone.lineage
    assert both.lineage == committed(1, 0).lineage


def test_an_outer_step_changes_nothing_until_its_slot_is_committed() -> None:
    state = committed(0, 1)
    before, anchor = state.describe(), state.states[0].anchor.clone()
    state.outer_step(0, 0)(Merged.of(torch.ones(3)))
    assert state.describe() == before and torch.equal(state.states[0].anchor, anchor)
