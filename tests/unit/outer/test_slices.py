"""How fragments are cut into slices, who owns them, and that cutting changes no value."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.outer.codec import SlicedPlan, make_codec, noise_seed
from torchtitan_diloco.outer.slices import Division, count_for, cut, owners

CODECS = ["fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk"]


def test_up_to_four_founding_islands_cut_nothing() -> None:
    assert [count_for(islands) for islands in range(1, 8)] == [1, 1, 1, 1, 5, 6, 7]


@given(st.integers(0, 5000), st.sampled_from([1, 2, 64, 4096]), st.integers(1, 12))
def test_slices_cover_a_fragment_without_gaps_at_multiples_of_the_unit(
    numel: int, unit: int, count: int
) -> None:
    ranges = cut(numel, unit, count)
    assert len(ranges) == count and ranges[0][0] == 0 and ranges[-1][1] == numel
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start and (start % unit == 0 or start == numel)
    units = [-(-(stop - start) // unit) for start, stop in ranges]
    assert max(units) - min(units) <= 1


def test_an_island_that_is_away_moves_its_own_slice_only() -> None:
    assert owners([0, 1, 2, 3, 4, 5], 6) == (0, 1, 2, 3, 4, 5)
    assert owners([0, 1, 3, 4, 5], 6) == (0, 1, 0, 3, 4, 5)
    assert owners([1, 2, 3, 4, 5, 7], 6) == (1, 1, 2, 3, 4, 5)
    assert owners([0, 1, 2, 3, 4, 5, 9], 6) == (0, 1, 2, 3, 4, 5)  # whoever came later owns none


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(1, 12))
def test_every_slice_has_one_owner_among_the_members_and_the_load_is_even(
    members: set[int], count: int
) -> None:
    found = owners(sorted(members), count)
    assert len(found) == count and set(found) <= members
    away = sum(j not in members for j in range(count))
    assert max(found.count(i) for i in members) <= 1 + -(-away // len(members))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.data())
def test_the_owners_parts_of_a_payload_make_it_up_again(sizes: list[int], data: st.DataObject) -> None:
    who = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    division = Division(tuple(who), tuple(sizes))
    payload = torch.randint(256, (sum(sizes),), dtype=torch.uint8)
    parts = {island: division.part(payload, island) for island in range(7)}
    assert {i: part.numel() for i, part in parts.items()} == {i: division.nbytes(i) for i in range(7)}
    assert torch.equal(division.join(parts), payload)


def encoded(plan, values: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, what they decode to, and the error that encoding gives."""
    buffer, out, error = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(plan.numel), values.clone()
    plan.encode(error, buffer, seed, error=error)
    plan.decode(buffer, out)
    return buffer, out, error


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("numel", [1, 5000, 70_001])
@pytest.mark.parametrize("wire", CODECS)
def test_cutting_changes_no_value_whatever_the_codec(wire: str, numel: int, rounding) -> None:
    codec = make_codec(wire, rounding=rounding)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    seed = noise_seed("run", 3, 0, 1)
    whole = encoded(codec.prepare(numel), values, seed)
    single = encoded(SlicedPlan(codec, cut(numel, codec.unit, 1)), values, seed)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))
    for count in (5, 7):
        plan = SlicedPlan(codec, cut(numel, codec.unit, count))
        buffer, out, error = encoded(plan, values, seed)
        assert buffer.numel() == codec.nbytes(numel)
        assert torch.equal(out, whole[1]) and torch.equal(error, whole[2])
        total = torch.empty(numel)
        plan.weighted_sum([buffer, buffer], [0.3, 0.7], total)
        assert torch.equal(total, out * 0.3 + out * 0.7)
        part = plan.slices[count // 2]
        alone = torch.empty(part.stop - part.start)
        part.plan.decode(buffer[part.low : part.high], alone)
        assert torch.equal(alone, out[part.start : part.stop])


def test_tensors_of_another_length_are_refused() -> None:
    codec = make_codec("int8", rounding="stochastic")
    plan = SlicedPlan(codec, cut(1000, codec.unit, 5))
    buffer, values = torch.empty(plan.nbytes, dtype=torch.uint8), torch.zeros(1000)
    for call in (
        lambda: plan.encode(torch.zeros(1001), buffer, 1),
        lambda: plan.encode(values, buffer[1:], 1),
        lambda: plan.encode(values, buffer, 1, error=torch.zeros(1001)),
        lambda: plan.decode(buffer, torch.zeros(1001)),
        lambda: plan.decode(torch.empty(plan.nbytes + 1, dtype=torch.uint8), values),
    ):
        with pytest.raises(ValueError, match="expected a contiguous"):
            call()
    with pytest.raises(ValueError, match="needs a seed"):
        plan.encode(values, buffer)
