"""Owners of slices: what they merge, and what becomes of the residual of the second encoding."""

import pytest
import torch

from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.outer.codec import make_codec
from torchtitan_diloco.outer.fragments import TensorSpec, balanced
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.slices import Division
from torchtitan_diloco.outer.values import Flat
from torchtitan_diloco.semi_sync.wire import Wire

ISLANDS = 5
FRAGMENTS = balanced([TensorSpec("w", (500,), torch.float32), TensorSpec("b", (500,), torch.float32)], 2)
SIZE = FRAGMENTS[0].numel
LOSSY = CodecConfig(wire="int4", block=10, error_feedback=True)


def wires(codec: CodecConfig = LOSSY, islands: int = ISLANDS) -> list[Wire]:
    return [Wire(codec, MergeConfig(), FRAGMENTS, "run", i, islands) for i in range(islands)]


def delta(slot: int, island: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * slot + island))


def contributions(islands: list[Wire], slot: int, fragment: int = 0) -> list[Contribution]:
    """What the islands send; the slot counts for their first residuals."""
    sent = []
    for i, wire in enumerate(islands):
        payload = wire.encode(fragment, slot, Flat(delta(slot, i)[: FRAGMENTS[fragment].numel])).clone()
        sent.append(Contribution(i, 1 + i, 10 + i, payload))
    return sent


def merge(
    islands: list[Wire], slot: int, owners: tuple[int, ...] = (0, 1, 2, 3, 4), committed: bool = True,
    settle: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:  # fmt: skip
    """A slot through its owners: what everybody takes, the exact merge, the weights."""
    sent = contributions(islands, slot)
    made, shares = islands[0].merge(0, sent)
    exact = made.whole()
    division = Division(owners, islands[0].merge.sizes(0))
    parts = {}
    for i, wire in enumerate(islands):
        cut = [Contribution(c.island, c.steps, c.tokens, division.part(c.payload, i)) for c in sent]
        parts[i], found = wire.merge.own(0, slot, division.of(i), cut)
        assert found == shares and parts[i].numel() == division.nbytes(i)
    merged = islands[0].merge.decode(0, division.join(parts)).whole()
    for wire in islands:
        if settle:
            wire.settle(0, slot, committed, committed)
    return merged, exact, shares


def residual(islands: list[Wire]) -> torch.Tensor:
    """All owners' residuals, where they belong; 0 where nobody has one."""
    total = torch.zeros(SIZE)
    for wire in islands:
        for name, values in wire.merge.residuals().items():
            fragment, _, place = name.removeprefix("residual.").partition("[")
            start, stop = map(int, place.rstrip("]").split(":"))
            assert fragment == "0" and not total[start:stop].any()
            total[start:stop] += values
    return total


def test_float32_through_owners_is_the_mean_itself_and_has_no_residual() -> None:
    islands = wires(CodecConfig(error_feedback=True))
    merged, exact, _ = merge(islands, 0)
    assert torch.equal(merged, exact)
    assert residual(islands).count_nonzero() == 0 and islands[0].merge.residuals() == {}


def test_what_is_taken_and_the_owners_residuals_add_up_to_what_was_merged() -> None:
    islands = wires()
    taken, given = torch.zeros(SIZE), torch.zeros(SIZE)
    for slot in range(6):
        merged, exact, _ = merge(islands, slot)
        taken, given = taken + merged, given + exact
        assert (merged - exact).abs().max() > 1e-3
        torch.testing.assert_close(taken + residual(islands), given, rtol=0, atol=1e-5)


def test_without_error_feedback_owners_keep_nothing() -> None:
    islands = wires(CodecConfig(wire="int4", block=10))
    assert not torch.equal(*merge(islands, 0)[:2])
    assert all(wire.residuals() == {} for wire in islands)


def test_a_failed_slot_or_another_try_moves_no_residual() -> None:
    islands, others = wires(), wires()
    for both in (islands, others):
        merge(both, 0)
    before = residual(islands)
    assert before.count_nonzero() > SIZE / 2
    merge(islands, 1, committed=False)
    assert torch.equal(residual(islands), before)
    # A try that breaks after its merge; the next has other owners, or is between few.
    sent = contributions(islands, 2)
    merge_again = Division((0, 1, 2, 3, 3), islands[0].merge.sizes(0))
    part = [Contribution(c.island, c.steps, c.tokens, merge_again.part(c.payload, 3)) for c in sent]
    islands[3].merge.own(0, 2, (3, 4), part)
    islands[3].merge(0, sent)
    for wire in islands:
        wire.settle(0, 2, committed=True, counted=False)
    assert torch.equal(residual(islands), before), "it was merged by everybody, and nothing was encoded again"
    assert torch.equal(merge(islands, 5)[0], merge(others, 5)[0])


def encoded_once(values: torch.Tensor) -> torch.Tensor:
    plan = make_codec("int4", block=10).prepare(values.numel())
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty_like(values)
    plan.encode(values, buffer)
    plan.decode(buffer, out)
    return out


def test_a_slice_that_gets_another_owner_begins_without_residual() -> None:
    islands = wires()
    merge(islands, 0)
    assert [len(wire.merge.residuals()) for wire in islands] == [1] * 5
    merge(islands, 1, owners=(0, 1, 2, 3, 0))  # island 4 listens
    assert [len(wire.merge.residuals()) for wire in islands] == [2, 1, 1, 1, 0]
    merged, exact, _ = merge(islands, 2)  # and has its slice back
    assert [len(wire.merge.residuals()) for wire in islands] == [1] * 5
    assert torch.equal(merged[400:], encoded_once(exact[400:].contiguous()))
    for start in range(0, 400, 100):
        here = slice(start, start + 100)
        assert not torch.equal(merged[here], encoded_once(exact[here].contiguous())), "its residual was lost"


def test_an_owner_that_has_taken_the_fragment_from_another_begins_anew() -> None:
    islands = wires()
    merge(islands, 0)
    islands[2].reset(0)
    assert islands[2].merge.residuals() == {} and len(islands[1].merge.residuals()) == 1
    # Its outcome may still come in; the slot it merged for is none of the history it has taken.
    merge(islands, 1, settle=False)
    islands[2].reset(0)
    for wire in islands:
        wire.settle(0, 1, True, True)
    assert islands[2].merge.residuals() == {} and len(islands[1].merge.residuals()) == 1


def test_an_end_that_comes_late_does_not_touch_what_a_later_slot_has_merged() -> None:
    islands = wires()
    merge(islands, 0)
    before = residual(islands)
    merge(islands, 3, settle=False)
    islands[0].merge.settle(0, 1, committed=True)
    assert torch.equal(residual(islands), before)


def test_residuals_of_slices_survive_a_checkpoint() -> None:
    straight, stopped = wires(), wires()
    for both in (straight, stopped):
        merge(both, 0)
        merge(both, 1)
    saved = [{name: t.clone() for name, t in wire.residuals().items()} for wire in stopped]
    assert sorted(saved[1]) == ["residual.0", "residual.0[100:200]", "residual.1"]
    resumed = wires()
    for wire, tensors in zip(resumed, saved, strict=True):
        wire.restore({"anchor.0": torch.zeros(3), **tensors})
    assert torch.equal(residual(resumed), residual(straight))
    assert torch.equal(merge(resumed, 2)[0], merge(straight, 2)[0])
    assert torch.equal(residual(resumed), residual(straight))


def test_a_checkpoint_of_a_run_that_cut_otherwise_has_no_residuals_of_slices() -> None:
    islands = wires()
    merge(islands, 0)
    saved = islands[1].residuals()
    (other,) = [w for w in wires(islands=6) if w._island == 1]
    other.restore(saved)
    assert sorted(other.residuals()) == ["residual.0", "residual.1"]
    with pytest.raises(ValueError, match=r"residual.0\[100:200\] has 99 values"):
        islands[1].restore({**saved, "residual.0[100:200]": torch.zeros(99)})
