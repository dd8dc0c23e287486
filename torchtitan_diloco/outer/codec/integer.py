"""int8 and int4: integers with one scale for a block of consecutive values.

Layout: ceil(numel / block) scales (bfloat16, little-endian), then the codes of all values: one signed byte each (int8), or
two's complement in half a byte, the even position in the low half (int4; an odd number of values leaves a zero half).

A block's scale is absmax / qmax rounded up to bfloat16, so no code exceeds qmax (127 or 7) and the float32 product
code * scale is exact. Two bytes a scale let blocks be half as long as float32 scales would: a smaller error for the same
bytes. value -> code is value * (1 / scale), rounded to the nearest integer (ties to even) or stochastically.
A block whose absmax is below 2^-100 is sent as zeros; one that holds NaN or infinity gets the scale NaN.
"""

from dataclasses import dataclass

import torch

from torchtitan_diloco.outer.codec.blocks import BlockCodec
from torchtitan_diloco.outer.codec.codec import Kernel
from torchtitan_diloco.outer.codec.constants import float32, int32
from torchtitan_diloco.outer.codec.nibbles import Nibbles
from torchtitan_diloco.outer.codec.noise import Noise

TINY = 2.0**-100
"""Below it, scales and products could be subnormal, and whether those survive is a setting of the process."""

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Int8(BlockCodec):
    """8-bit integers; 1 + 2 / block bytes a value."""

    def sections(self, numel: int) -> tuple[int, ...]:
        return 2 * -(-numel // self.block), numel

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return Int8Kernel(size, self.block, self.stochastic, device)


@dataclass(frozen=True, slots=True)
class Int4(BlockCodec):
    """4-bit integers, -7 to 7; 1/2 + 2 / block bytes a value."""

    def sections(self, numel: int) -> tuple[int, ...]:
        return 2 * -(-numel // self.block), -(-numel // 2)

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return Int4Kernel(size, self.block, self.stochastic, device)


class Quantizer:
    """Scales of blocks and integers on them: ``size`` values in rows of ``block``."""

    def __init__(self, size: int, block: int, qmax: int, stochastic: bool, device: torch.device) -> None:
        rows = size // block
        self._shape = (rows, block)
        self._qmax = qmax
        # The largest bfloat16 that times qmax does not overflow.
        largest = torch.tensor(LARGEST / qmax).view(torch.int32).bitwise_and_(~0xFFFF)
        self._largest_scale = float(largest.view(torch.float32))
        self._inverse_qmax = float32(1 / qmax, device)
        self._tiny_limit, self._zero = float32(TINY, device), float32(0.0, device)
        self._below, self._kept = int32(0xFFFF, device), int32(~0xFFFF, device)
        self._unit = float32(2.0**-24, device)
        self.wire_scales = torch.empty(rows, dtype=torch.bfloat16, device=device)
        self._absmax, self._scale, self._inverse = torch.empty(3, rows, device=device)
        self._tiny = torch.empty(rows, dtype=torch.bool, device=device)
        self._scaled = torch.empty(size, device=device)
        self._noise = Noise(size, 24, device) if stochastic else None

    def quantize(self, values: torch.Tensor, seed: int, first: int) -> torch.Tensor:
        """Integers, as float32 ``[size]`` valid until next time, of ``values`` (same shape); fills ``wire_scales``."""
        scaled = self._scaled
        torch.abs(values, out=scaled)
        torch.amax(scaled.view(self._shape), 1, out=self._absmax)
        self._choose_scales()
        rows = scaled.view(self._shape)
        torch.mul(values.view(self._shape), self._inverse.view(-1, 1), out=rows)
        if self._noise is None:
            return scaled.round_()
        # floor(v + u) with u in [0, 1) is v on average; the sum is rounded at 2^-18 of a step, which is the bias.
        uniform = self._uniform(self._noise.draw(seed, first))
        return scaled.add_(uniform).floor_().clamp_(-self._qmax, self._qmax)

    def _choose_scales(self) -> None:
        absmax, scale = self._absmax, self._scale
        torch.lt(absmax, self._tiny_limit, out=self._tiny)
        # Not divided: accelerators divide by a scalar in their own ways.
        torch.mul(absmax, self._inverse_qmax, out=scale)
        scale.view(torch.int32).add_(self._below).bitwise_and_(self._kept)
        scale.clamp_(max=self._largest_scale).masked_fill_(self._tiny, 0.0)
        scale.add_(absmax.mul_(self._zero))  # 0 * infinity and 0 * NaN are NaN
        self.wire_scales.copy_(scale)
        torch.reciprocal(scale, out=self._inverse).masked_fill_(self._tiny, 0.0)

    def _uniform(self, bits: torch.Tensor) -> torch.Tensor:
        """24 random bits as float32 in [0, 1), in place."""
        uniform = bits.view(torch.float32)
        return uniform.copy_(bits).mul_(self._unit)

    def scale(self, integers: torch.Tensor, out: torch.Tensor) -> None:
        """``out = integers * scale``; both float32 ``[size]``, and may be the same."""
        self._scale.copy_(self.wire_scales)
        torch.mul(integers.view(self._shape), self._scale.view(-1, 1), out=out.view(self._shape))


class Int8Kernel(Kernel):
    """A signed byte for each value."""

    def __init__(self, size: int, block: int, stochastic: bool, device: torch.device) -> None:
        self.size = size
        self._quantizer = Quantizer(size, block, 127, stochastic, device)
        self._codes = torch.empty(size, dtype=torch.int8, device=device)
        self.sections = (self._quantizer.wire_scales.view(torch.uint8), self._codes.view(torch.uint8))

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        self._codes.copy_(self._quantizer.quantize(values, seed, first))

    def decode(self, out: torch.Tensor) -> None:
        self._quantizer.scale(out.copy_(self._codes), out)


class Int4Kernel(Kernel):
    """Half a byte for each value. Code 8 (-8) is never sent, and decodes to -8 scales."""

    def __init__(self, size: int, block: int, stochastic: bool, device: torch.device) -> None:
        self.size = size
        self._quantizer = Quantizer(size, block, 7, stochastic, device)
        self._codes = torch.empty(size, dtype=torch.int8, device=device)
        levels = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32)
        self._nibbles = Nibbles(size, levels, device)
        self.sections = (self._quantizer.wire_scales.view(torch.uint8), self._nibbles.packed)

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        self._codes.copy_(self._quantizer.quantize(values, seed, first))
        self._nibbles.pack(self._codes.view(torch.uint8))

    def decode(self, out: torch.Tensor) -> None:
        self._quantizer.scale(self._nibbles.unpack(), out)
