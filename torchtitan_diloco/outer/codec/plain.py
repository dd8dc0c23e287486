"""fp32 and bf16: one number a value, no scales.

Layout: ``numel`` little-endian numbers of 4 or 2 bytes.
"""

from dataclasses import dataclass

import torch

from torchtitan_diloco.outer.codec.codec import Codec, Kernel
from torchtitan_diloco.outer.codec.constants import float32, int32
from torchtitan_diloco.outer.codec.noise import Noise


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """The values themselves; nothing is lost."""

    is_plain = True

    @property
    def unit(self) -> int:
        return 1

    def sections(self, numel: int) -> tuple[int, ...]:
        return (4 * numel,)

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return CastKernel(torch.float32, size, device)


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """The nearest bfloat16 (ties to even), or one of its two neighbours at random.

    Values beyond the largest bfloat16 (3.39e38) become infinite, as in any cast.
    """

    stochastic: bool = False

    @property
    def unit(self) -> int:
        return 1

    def sections(self, numel: int) -> tuple[int, ...]:
        return (2 * numel,)

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return (StochasticCastKernel if self.stochastic else CastKernel)(torch.bfloat16, size, device)


class CastKernel(Kernel):
    """torch's own conversion."""

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device) -> None:
        self.size = size
        self._numbers = torch.empty(size, dtype=dtype, device=device)
        self.sections = (self._numbers.view(torch.uint8),)

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        self._numbers.copy_(values)

    def decode(self, out: torch.Tensor) -> None:
        out.copy_(self._numbers)


class StochasticCastKernel(CastKernel):
    """Adds 16 random bits below the last one that bfloat16 keeps, and cuts there."""

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device) -> None:
        super().__init__(dtype, size, device)
        self._noise = Noise(size, 16, device)
        self._rounded = torch.empty(size, device=device)
        self._poison = torch.empty(size, device=device)
        self._kept, self._zero = int32(~0xFFFF, device), float32(0.0, device)

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        bits = self._rounded.view(torch.int32)
        torch.add(values.view(torch.int32), self._noise.draw(seed, first), out=bits)
        bits.bitwise_and_(self._kept)
        # The carry can turn a NaN into a number; 0 * NaN and 0 * infinity bring it back.
        torch.mul(values, self._zero, out=self._poison)
        self._numbers.copy_(self._rounded.add_(self._poison))
