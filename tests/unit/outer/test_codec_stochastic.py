"""Stochastic rounding: right on average, the same for the same seed everywhere, different for every other seed."""

import pytest
import torch

from tests.helpers.codecs import gaussian
from torchtitan_diloco.outer.codec import make_codec, noise_seed
from torchtitan_diloco.outer.codec.noise import Noise

WIRES = ["bf16", "int8", "int4", "fp4_e3m0"]


def noise_in_python(seed: int, position: int, bits: int) -> int:
    """The documented hash, one position at a time, on unbounded integers."""
    z = (position * 0x9E3779B9 + seed) % 2**32
    z ^= z >> 16
    z = z * 0x7FEB352D % 2**32 ^ seed >> 32
    z ^= z >> 15
    z = z * 0x846CA68B % 2**32
    return z >> (32 - bits)


@pytest.mark.parametrize("bits", [16, 23, 24, 31])
@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFFFFFFFFFF, noise_seed("run", 3, 1, 2)])
@pytest.mark.parametrize("first", [0, 65536, 3_000_000_001])
def test_noise_is_the_documented_hash(bits, seed, first):
    drawn = Noise(200, bits, torch.device("cpu")).draw(seed, first).tolist()
    assert drawn == [noise_in_python(seed, first + i, bits) for i in range(200)]


def test_noise_is_uniform_and_uncorrelated():
    n = 1_000_000
    draw = lambda seed: Noise(n, 24, torch.device("cpu")).draw(seed, 0).double() / 2**24
    one, other = draw(noise_seed("r", 0, 0, 0)), draw(noise_seed("r", 0, 0, 1))
    spread = 1 / (12 * n) ** 0.5
    assert abs(float(one.mean()) - 0.5) < 4 * spread
    counts = torch.histc(one, 1000, 0, 1)
    chi_square = float(((counts - n / 1000) ** 2 / (n / 1000)).sum())
    assert abs(chi_square - 999) < 5 * (2 * 999) ** 0.5
    for a, b in [(one, other), (one[1:], one[:-1]), (one[2:], one[:-2]), (one[64:], one[:-64])]:
        correlation = float(((a - 0.5) * (b - 0.5)).mean()) * 12
        assert abs(correlation) < 5 / n**0.5


def test_seeds_differ_by_run_slot_part_and_island():
    seeds = {
        noise_seed(run, s, p, i)
        for run in ("a", "b", "1:a")
        for s in range(20)
        for p in range(5)
        for i in range(5)
    }
    assert len(seeds) == 3 * 20 * 5 * 5
    assert noise_seed("run", 3, 1, 2) == 0x260CF95A52C3943A  # must not change between releases


@pytest.mark.parametrize("wire", WIRES)
def test_rounding_is_right_on_average(wire):
    """Averaged over draws the error falls as 1 / sqrt(draws), also at the ends of a block's range."""
    values, draws = gaussian(2048), 400
    values[:64] *= torch.logspace(-4, 0, 64)  # values far below a step
    plan = make_codec(wire, rounding="stochastic").prepare(2048)
    buffer, out, total = (
        torch.empty(plan.nbytes, dtype=torch.uint8),
        torch.empty(2048),
        torch.zeros(2048).double(),
    )
    square = torch.zeros(2048).double()
    for draw in range(draws):
        plan.encode(values, buffer, noise_seed("test", draw, 0, 0))
        plan.decode(buffer, out)
        total += out
        square += (out.double() - values.double()) ** 2
    # By groups of like magnitude, away from zero counted positive: a rule that shrinks or cuts shows in one of them.
    bias = (total / draws - values.double()) * values.double().sign()
    variance = square / draws / draws
    groups = values.abs().argsort().view(8, 256)
    z = bias[groups].sum(1) / variance[groups].sum(1).sqrt()
    assert float(z.abs().max()) < 5, z


@pytest.mark.parametrize("wire", [*WIRES, "topk"])
def test_bytes_depend_on_the_seed_and_on_nothing_else(wire):
    values = gaussian(30_000)
    coder = make_codec(wire, rounding="stochastic")

    def encoded(seed: int, cached_values: int) -> torch.Tensor:
        plan = coder.prepare(len(values), cached_values=cached_values)
        buffer = torch.empty(plan.nbytes, dtype=torch.uint8)
        plan.encode(values, buffer, seed)
        return buffer

    assert torch.equal(encoded(1, 4096), encoded(1, 1 << 20))
    assert torch.equal(encoded(1, 4096), encoded(1, 12_345))
    assert not torch.equal(encoded(1, 4096), encoded(2, 4096))


def test_a_seed_is_asked_for():
    plan = make_codec("int8", rounding="stochastic").prepare(10)
    with pytest.raises(ValueError, match="seed"):
        plan.encode(torch.zeros(10), torch.empty(plan.nbytes, dtype=torch.uint8))
