"""Inputs that codecs must survive, and the comparison of a codec with its NumPy reference."""

from dataclasses import replace

import numpy as np
import torch

from tests.golden import codec_reference as reference
from tests.golden.codec_reference import Wire
from torchtitan_diloco.outer.codec import make_codec
from torchtitan_diloco.outer.codec.registry import Rounding

WIRES = (
    Wire("fp32"),
    Wire("bf16"),
    Wire("int8"),
    Wire("int8", block=128),
    Wire("int8", block=6),
    Wire("int4"),
    Wire("int4", block=10),
    Wire("fp4_e3m0"),
    Wire("fp4_e3m0", block=128),
    Wire("fp4_e3m0", block=2),
    Wire("topk"),
    Wire("topk", density=1 / 32),
    Wire("topk", density=0.0005),
)

STOCHASTIC = tuple(replace(wire, stochastic=True) for wire in WIRES if wire.name != "fp32")

SMALL = 8192
"""Values a plan works on at a time in tests, so that short tensors have full and partial pieces."""


def name_of(wire: Wire) -> str:
    parts = (wire.name, wire.block, wire.density, "stochastic" if wire.stochastic else None)
    return "-".join(str(part) for part in parts if part is not None)


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    """Of size 1e-3. NumPy's numbers, since torch's own depend on the CPU capability."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel) * 1e-3).float()


def heavy_tailed(numel: int, seed: int = 0) -> torch.Tensor:
    """Gaussian with a log-normal size (sigma 1.5), so that most of the energy is in few values."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(1e-3 * random.standard_normal(numel) * random.lognormal(0, 1.5, numel)).float()


def awkward(numel: int, seed: int = 0) -> torch.Tensor:
    """Zero stretches, exact halves, powers of two, subnormals, equal values and values at the ends of float32's range."""
    random = np.random.default_rng(seed)
    plain = heavy_tailed(numel, seed).numpy().astype(np.float64)
    small = random.integers(-30, 31, numel).astype(np.float64)
    powers = np.sign(small) * 2.0 ** random.integers(-12, 3, numel)
    even = np.arange(numel) % 2 == 0
    kinds = [
        0 * plain,
        small / 2,
        powers,
        1.5 * powers,
        plain * 1e-38,
        plain * 1e38,
        small * 2.0**-149,
        0 * plain + 0.25,
        np.where(np.abs(small) > 15, np.copysign(float(np.finfo(np.float32).max), small), plain),
        np.where(even, 127, small / 2),  # on int8's scale 1 the others are ties
        np.where(even, -7, np.clip(small, -13, 13) / 2),  # and on int4's
        plain,
    ]
    kind = random.integers(0, len(kinds), -(-numel // 128)).repeat(128)[:numel]
    largest = float(np.finfo(np.float32).max)
    return torch.from_numpy(np.clip(np.choose(kind, kinds), -largest, largest).astype(np.float32))


def check_wire(wire: Wire, values: torch.Tensor, seed: int = 0) -> None:
    """Raises AssertionError unless the codec's bytes and decoded bits are the reference's. seed: of the noise."""
    rounding: Rounding = "stochastic" if wire.stochastic else "nearest"
    coder = make_codec(wire.name, block=wire.block, density=wire.density, rounding=rounding)
    plan = coder.prepare(len(values), cached_values=SMALL)
    given = values.clone()
    buffer = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    plan.encode(values, buffer, seed)
    assert torch.equal(values.view(torch.int32), given.view(torch.int32)), "the values were changed"
    expected = reference.encode(wire, values.numpy(), seed)
    assert len(expected) == plan.nbytes, f"{plan.nbytes} bytes instead of {len(expected)}"
    wrong = np.flatnonzero(buffer.numpy() != expected)
    assert len(wrong) == 0, f"{len(wrong)} of {len(expected)} bytes differ, first at {wrong[:3]}"
    # A second plan, so that nothing is left over from encoding.
    other = coder.prepare(len(values))
    out = torch.full_like(values, torch.nan)
    other.decode(buffer, out)
    bits = reference.decode(wire, expected, len(values)).view(np.uint32)
    assert np.array_equal(out.numpy().view(np.uint32), bits), "the decoded values differ"
