"""fp4_e3m0: a sign and a 3-bit exponent on a power-of-two scale for each block (Streaming DiLoCo, arXiv 2501.18512, 3.3).

Layout: ceil(numel / block) bytes E, then half a byte for each value, the even position in the low half: bit 3 is the sign,
the rest a code c. c = 0 is zero, else the value is +-2^(c - 7) * 2^(E - 127). E = 255 marks a block that held NaN or
infinity and decodes to NaN; E < 7 one whose values are all zero or too small, and decodes to zero.

2^(E - 127) is the block's absmax rounded to the nearest power of two (halfway, 1.5 * 2^n, up): one byte, and scaling is
exact. Nearest rounding is nearest in value, halfway away from zero, also between zero and the smallest level (where
y + 1, with y the value in smallest levels, is rounded to float32 first). Stochastic rounding takes E upwards and
picks one of the two levels around a value with the odds that make it right on average.
"""

from dataclasses import dataclass

import torch

from torchtitan_diloco.outer.codec.blocks import BlockCodec
from torchtitan_diloco.outer.codec.codec import Kernel
from torchtitan_diloco.outer.codec.constants import int32
from torchtitan_diloco.outer.codec.nibbles import Nibbles
from torchtitan_diloco.outer.codec.noise import Noise

INFINITY_BITS = 0x7F800000
LARGEST_POWER_BITS = 0x7F000000  # 2^127
HALF_MANTISSA = 1 << 22
FULL_MANTISSA = (1 << 23) - 1
ONE_BITS = 127 << 23
TOP_LEVEL = 64.0  # 2^6 smallest levels
SMALLEST_E = 7  # its smallest level is 2^-126, the smallest normal float32
NOT_FINITE = 255


@dataclass(frozen=True, slots=True)
class Fp4E3M0(BlockCodec):
    """1/2 + 1 / block bytes a value."""

    block: int = 32

    def sections(self, numel: int) -> tuple[int, ...]:
        return -(-numel // self.block), -(-numel // 2)

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return Fp4Kernel(size, self.block, self.stochastic, device)


def power_table(device: torch.device, exponent_of: list[int | None]) -> torch.Tensor:
    """float32 ``[256]``: 2 to each exponent, 0 for None; NaN at the mark of blocks that are not finite."""
    table = torch.tensor([0.0 if e is None else 2.0**e for e in exponent_of])
    table[NOT_FINITE] = torch.nan
    return table.to(device)


class Fp4Kernel(Kernel):
    """Integer arithmetic on the bit patterns of float32."""

    def __init__(self, size: int, block: int, stochastic: bool, device: torch.device) -> None:
        rows = size // block
        self.size = size
        self._shape = (rows, block)
        levels = torch.tensor([0.0] + [2.0 ** (c - 7) for c in range(1, 8)])
        self._nibbles = Nibbles(size, torch.cat([levels, -levels]), device)
        used = range(SMALLEST_E, NOT_FINITE)
        self._scales = power_table(device, [E - 127 if E in used else None for E in range(256)])
        self._inverses = power_table(device, [133 - E if E in used else None for E in range(256)])
        self._wire_E = torch.empty(rows, dtype=torch.uint8, device=device)
        self._E = torch.empty(rows, dtype=torch.int32, device=device)
        self._not_finite = torch.empty(rows, dtype=torch.bool, device=device)
        self._absmax, self._factor = torch.empty(2, rows, device=device)
        self._y, self._doubled = torch.empty(2, size, device=device)
        self._narrow, self._signs = torch.empty(2, size, dtype=torch.int16, device=device)
        self._noise = Noise(size, 23, device) if stochastic else None
        self._infinity, self._mantissa_bits = int32(INFINITY_BITS, device), int32(23, device)
        self._sign_shift = torch.tensor(5, dtype=torch.int16, device=device)
        self._round_scale = int32(FULL_MANTISSA if stochastic else HALF_MANTISSA, device)
        self._round_code = int32((0 if stochastic else HALF_MANTISSA) - ONE_BITS, device)
        self.sections = (self._wire_E, self._nibbles.packed)

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        y = self._y
        torch.abs(values, out=y)
        torch.amax(y.view(self._shape), 1, out=self._absmax)
        self._choose_scales()
        torch.index_select(self._inverses, 0, self._E, out=self._factor)
        y.view(self._shape).mul_(self._factor.view(-1, 1)).clamp_(max=TOP_LEVEL)
        # 2y has y's mantissa and, in its exponent, the code of the level below y. Under the smallest level, where
        # levels are 0 and 1, y + 1 takes its place: its mantissa is y, its exponent the code 0.
        doubled = torch.clamp(y, min=1.0, out=self._doubled).add_(y)
        torch.copysign(doubled, values, out=doubled)
        bits = doubled.view(torch.int32)
        bits.add_(self._round_code)
        if self._noise is not None:
            bits.add_(self._noise.draw(seed, first))
        self._narrow.copy_(
            bits.bitwise_right_shift_(self._mantissa_bits)
        )  # the code, less 256 where negative
        torch.bitwise_right_shift(self._narrow, self._sign_shift, out=self._signs)  # less 8 where negative
        self._nibbles.pack(self._narrow.bitwise_or_(self._signs))

    def _choose_scales(self) -> None:
        bits, E = self._absmax.view(torch.int32), self._E
        torch.ge(bits, self._infinity, out=self._not_finite)
        torch.clamp(bits, max=LARGEST_POWER_BITS, out=E)
        E.add_(self._round_scale).bitwise_right_shift_(self._mantissa_bits)
        E.masked_fill_(self._not_finite, NOT_FINITE)
        self._wire_E.copy_(E)

    def decode(self, out: torch.Tensor) -> None:
        self._E.copy_(self._wire_E)
        torch.index_select(self._scales, 0, self._E, out=self._factor)
        levels = self._nibbles.unpack().view(self._shape)
        torch.mul(levels, self._factor.view(-1, 1), out=out.view(self._shape))
