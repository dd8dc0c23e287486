"""Noise for stochastic rounding: a hash of seed and position, so that every machine and thread count draws the same.

A torch.Generator promises no such thing across versions and devices.
"""

import hashlib

import torch

from torchtitan_diloco.outer.codec.constants import int32

# lowbias32, by C. Wellons: https://nullprogram.com/blog/2018/07/31/ (public domain). The step is 2^32 / golden ratio.
STEP = 0x9E3779B9
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def noise_seed(run: str, slot: int, part: int, island: int) -> int:
    """64 bits that differ for every encoding of a run: no two islands, slots or parts round with the same noise.

    They are BLAKE2b's (8 bytes, little-endian) of "<slot>:<part>:<island>:<run>" in UTF-8. part: a fragment's number; or,
    counted on behind the last of them, that of a merged one, whose slices their owners encode.
    """
    name = f"{slot}:{part}:{island}:{run}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def as_int32(value: int) -> int:
    """The low 32 bits as torch's signed integer."""
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


class Noise:
    """32 random bits for each of ``size`` consecutive positions.

    With a, b the low and high half of the seed and i the position, all modulo 2^32:
    z = i * STEP + a;  z ^= z >> 16;  z *= M_0;  z ^= b;  z ^= z >> 15;  z *= M_1.  The high bits are the better ones.
    """

    def __init__(self, size: int, bits: int, device: torch.device) -> None:
        """bits: how many of the 32 are wanted, 1 to 31."""
        positions = torch.arange(size, dtype=torch.int64, device=device) * STEP & 0xFFFFFFFF
        self._steps = ((positions ^ 0x80000000) - 0x80000000).to(torch.int32)
        self._bits = torch.empty_like(self._steps)
        self._shifted = torch.empty_like(self._steps)
        self._start, self._key = int32(0, device), int32(0, device)
        # torch shifts signed integers arithmetically; the masks remove the copies of the sign.
        self._shifts = {
            n: (int32(n, device), int32((1 << (32 - n)) - 1, device)) for n in (15, 16, 32 - bits)
        }
        self._last = 32 - bits
        self._multipliers = [int32(as_int32(m), device) for m in MULTIPLIERS]

    def _shift(self, count: int, out: torch.Tensor) -> torch.Tensor:
        shift, mask = self._shifts[count]
        return torch.bitwise_right_shift(self._bits, shift, out=out).bitwise_and_(mask)

    def draw(self, seed: int, first: int) -> torch.Tensor:
        """int32 ``[size]``: random bits for positions first, first + 1, ...; valid until next time."""
        z, shifted = self._bits, self._shifted
        torch.add(self._steps, self._start.fill_(as_int32(first * STEP + seed)), out=z)
        z.bitwise_xor_(self._shift(16, shifted))
        z.mul_(self._multipliers[0]).bitwise_xor_(self._key.fill_(as_int32(seed >> 32)))
        z.bitwise_xor_(self._shift(15, shifted))
        z.mul_(self._multipliers[1])
        return self._shift(self._last, z)
