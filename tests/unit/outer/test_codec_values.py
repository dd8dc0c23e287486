"""What comes back from a codec: errors within their bounds, odd input survived, sums as separate steps would make them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.codecs import WIRES, awkward, gaussian, heavy_tailed, name_of
from torchtitan_diloco.outer.codec import Plan, make_codec

FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)
VECTORS = st.lists(st.one_of(FLOATS, st.just(0.0), st.floats(-1, 1, width=32)), max_size=300)


def through(plan: Plan, values: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.full_like(values, torch.nan)
    plan.encode(values, buffer, seed)
    plan.decode(buffer, out)
    return out


def absmax_of_block(values: torch.Tensor, block: int) -> torch.Tensor:
    """For every value the largest magnitude of its block, float64."""
    rows = torch.nn.functional.pad(values.double().abs(), (0, -len(values) % block)).view(-1, block)
    return rows.amax(1).repeat_interleave(block)[: len(values)]


@settings(max_examples=150, deadline=None)
@given(VECTORS, st.sampled_from(["int8", "int4"]), st.sampled_from([2, 8, 64]), st.booleans())
def test_integers_err_by_half_a_step_or_a_whole_one_when_stochastic(numbers, wire, block, stochastic):
    values = torch.tensor(numbers, dtype=torch.float32)
    rounding = "stochastic" if stochastic else "nearest"
    out = through(make_codec(wire, block=block, rounding=rounding).prepare(len(values)), values, seed=1)
    absmax = absmax_of_block(values, block)
    # A scale is rounded up by at most 2^-7 of itself; 2^-16 is for the float32 arithmetic.
    step = absmax / (127 if wire == "int8" else 7) * (1 + 2**-7) * (1 + 2**-16)
    bound = (step if stochastic else step / 2) + absmax * 2**-16
    bound[absmax < 2**-100] = 2**-100
    assert bool(((out.double() - values.double()).abs() <= bound).all())


@settings(max_examples=150, deadline=None)
@given(VECTORS, st.sampled_from([2, 8, 32]), st.booleans())
def test_fp4_errs_by_a_third_or_by_a_whole_gap_when_stochastic(numbers, block, stochastic):
    values = torch.tensor(numbers, dtype=torch.float32)
    rounding = "stochastic" if stochastic else "nearest"
    out = through(make_codec("fp4_e3m0", block=block, rounding=rounding).prepare(len(values)), values, seed=1)
    absmax = absmax_of_block(values, block)
    # Nearest: x in [1, 2) goes to 1 or 2, at most 1/3 of 1.5 away. Stochastic: at most x away from either neighbour.
    relative = values.double().abs() * (1.0 if stochastic else 1 / 3)
    smallest = absmax * 2**-5 / (1 if stochastic else 2)
    bound = torch.maximum(relative, smallest) * (1 + 1e-6)
    bound[absmax < 2**-118] = 2**-118
    assert bool(((out.double() - values.double()).abs() <= bound).all())


@settings(max_examples=100, deadline=None)
@given(VECTORS)
def test_bf16_errs_by_half_a_unit_in_the_last_place(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    out = through(make_codec("bf16").prepare(len(values)), values)
    assert bool(((out.double() - values.double()).abs() <= values.double().abs() * 2**-8 + 2**-133).all())


@pytest.mark.parametrize("density", [1 / 64, 1 / 16, 1.0])
def test_topk_sends_the_largest_of_each_chunk_and_nothing_else(density):
    values = heavy_tailed(3 * 4096)
    coder = make_codec("topk", density=density)
    out = through(coder.prepare(len(values)), values).view(3, 4096)
    for got, chunk in zip(out, values.view(3, 4096), strict=True):
        order = chunk.abs().sort(descending=True).indices
        sent, left = order[: coder.k], order[coder.k :]
        assert got[left].abs().max() == 0 if len(left) else True
        step = chunk.abs().max() / 127 * (1 + 2**-7)
        assert bool(((got - chunk)[sent].abs() <= step / 2 * (1 + 1e-5)).all())


EXPECTED_RMS = {"fp32": 0, "bf16": 0.0017, "int8": 0.0060, "int4": 0.108, "fp4_e3m0": 0.194}
"""Gaussian input, default block: bf16 and fp4 from the formats (uniform in a binade), integers for E[absmax of 64] = 2.4."""


@pytest.mark.parametrize("wire", EXPECTED_RMS)
def test_error_on_gaussian_input(wire):
    values = gaussian(100_000)
    out = through(make_codec(wire).prepare(100_000), values)
    assert float((out - values).norm() / values.norm()) == pytest.approx(EXPECTED_RMS[wire], rel=0.03)


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_stay_zeros_and_one_value_survives(wire, rounding):
    coder = make_codec(wire.name, block=wire.block, density=wire.density, rounding=rounding)
    assert torch.count_nonzero(through(coder.prepare(5000), torch.zeros(5000), 1)) == 0
    assert through(coder.prepare(0), torch.zeros(0), 1).shape == (0,)
    assert through(coder.prepare(1), torch.tensor([-0.5]), 1).item() == pytest.approx(-0.5, rel=0.01)


@pytest.mark.parametrize("wire", ["int8", "int4", "fp4_e3m0", "topk"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_finite_input_decodes_to_finite_values(wire, rounding):
    plan = make_codec(wire, rounding=rounding).prepare(50_000)
    for seed in range(5):
        assert bool(torch.isfinite(through(plan, awkward(50_000, seed), seed)).all())
    largest = torch.full((50_000,), torch.finfo(torch.float32).max)
    largest[1::3] *= -1
    out = through(plan, largest, 1)
    assert bool(torch.isfinite(out).all())
    sent = out != 0
    assert bool((out[sent] / largest[sent] >= 0.49).all())


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_input_that_is_not_finite_shows_after_decoding_and_only_in_its_block(wire, rounding, bad):
    values = gaussian(3 * 4096)
    coder = make_codec(wire, rounding=rounding)
    clean = through(coder.prepare(len(values)), values, 7)
    values[5000] = bad
    out = through(coder.prepare(len(values)), values, 7)
    first = 5000 // coder.unit * coder.unit
    inside = torch.zeros(len(values), dtype=torch.bool)
    inside[first : first + coder.unit] = True
    assert torch.equal(out[~inside], clean[~inside])
    assert not math.isfinite(out[5000].item())
    if wire not in ("fp32", "bf16", "topk"):
        assert bool(torch.isnan(out[inside]).all())


def test_a_nan_with_any_payload_is_seen():
    for bits in (0x7FFFFFFF, -1, 0x7F800001):
        for wire in ("bf16", "int8", "int4", "fp4_e3m0", "topk"):
            for rounding in ("nearest", "stochastic"):
                values = gaussian(64)
                values.view(torch.int32)[3] = bits
                assert math.isnan(
                    through(make_codec(wire, rounding=rounding).prepare(64), values, 1)[3].item()
                )


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_scaled_and_added_decodings_are_the_separate_steps_to_the_bit(wire):
    numel, share = 20_001, 1 / 3
    plan = make_codec(wire.name, block=wire.block, density=wire.density).prepare(numel, cached_values=8192)
    buffer = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.encode(heavy_tailed(numel), buffer)
    decoded, scaled, total = torch.empty(numel), torch.empty(numel), gaussian(numel, 5)
    plan.decode(buffer, decoded)
    plan.decode_scaled(buffer, share, scaled)
    expected = total + decoded * share
    plan.decode_add(buffer, share, total)
    assert torch.equal(scaled.view(torch.int32), (decoded * share).view(torch.int32))
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_a_weighted_sum_is_its_steps_to_the_bit(wire, offset):
    numel, shares = 20_001, [0.5, 1 / 3, 1 / 6]
    plan = make_codec(wire.name, block=wire.block, density=wire.density).prepare(numel, cached_values=8192)
    buffers = [torch.empty(plan.nbytes + offset, dtype=torch.uint8)[offset:] for _ in shares]
    for seed, buffer in enumerate(buffers):
        plan.encode(gaussian(numel, seed), buffer)
    total, expected = torch.empty(2, numel)
    plan.weighted_sum(buffers, shares, total)
    plan.decode_scaled(buffers[0], shares[0], expected)
    for buffer, share in zip(buffers[1:], shares[1:], strict=True):
        plan.decode_add(buffer, share, expected)
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_sum_of_plain_values_may_lie_in_the_memory_of_any_of_them(number):
    numel, shares = 20_001, [0.5, 1 / 3, 1 / 6]
    plan = make_codec("fp32").prepare(numel, cached_values=8192)
    buffers = [gaussian(numel, seed).view(torch.uint8) for seed in range(3)]
    expected = torch.empty(numel)
    plan.weighted_sum(buffers, shares, expected)
    total = buffers[number].view(torch.float32)
    pieces = list(plan.sum_by_pieces(buffers, shares, total))
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))
    assert [p.start for p in pieces] == [0, 8192, 16384] and pieces[-1].stop == numel


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_the_error_is_what_decoding_loses_and_may_replace_the_values(wire):
    numel = 20_001
    plan = make_codec(wire.name, block=wire.block, density=wire.density).prepare(numel, cached_values=8192)
    values, buffer = heavy_tailed(numel), torch.empty(plan.nbytes, dtype=torch.uint8)
    plain, decoded, error = torch.empty_like(buffer), torch.empty(numel), torch.empty(numel)
    plan.encode(values, plain)
    plan.encode(values, buffer, error=error)
    assert torch.equal(plain, buffer)
    plan.decode(buffer, decoded)
    assert torch.equal(error, values - decoded)
    plan.encode(values, buffer, error=values)
    assert torch.equal(plain, buffer) and torch.equal(values, error)


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_buffers_may_lie_at_any_byte(wire):
    numel = 5001
    plan = make_codec(wire.name, block=wire.block, density=wire.density).prepare(numel)
    values, out = gaussian(numel + 1)[1:], torch.empty(numel + 1)
    aligned = torch.empty(plan.nbytes, dtype=torch.uint8)
    odd = torch.empty(plan.nbytes + 3, dtype=torch.uint8)[3:]
    plan.encode(values, aligned)
    plan.encode(values, odd)
    assert torch.equal(aligned, odd)
    plan.decode(odd, out[1:])
    expected = torch.empty(numel)
    plan.decode(aligned, expected)
    assert torch.equal(out[1:], expected)
