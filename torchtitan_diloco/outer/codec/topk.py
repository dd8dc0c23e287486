"""topk: of every 4096 consecutive values the k largest, as 8-bit integers with their places (as in SparseLoCo, 2508.15706).

Layout, with n = ceil(numel / 4096) chunks: n scales (bfloat16), n * k signed bytes, n * 3k/2 bytes of places. A last, partial
chunk is filled up with zeros, so it takes as much room as the others. Within a chunk values come by falling magnitude. Two
places p, q (12 bits each) take three bytes: p & 255, p >> 8 | (q & 15) << 4, q >> 4.

Magnitudes are compared in sign-less float32 bits without the lowest 12 (to one part in 2048); of equal ones the
lower place wins. So which values go, and in which order, is the same whatever finds them. Integers and scale are as int8's
with the k values as the block. Eight bits cost 2.5 bytes a sent value instead of bfloat16's 3.5, and what they lose is small
beside what is not sent. With NaN or infinity in a chunk, all that it sends is NaN.
"""

from dataclasses import dataclass

import torch

from torchtitan_diloco.outer.codec.codec import Codec, Kernel
from torchtitan_diloco.outer.codec.constants import int32
from torchtitan_diloco.outer.codec.integer import Quantizer

CHUNK = 4096
PLACE_BITS = 12
MAGNITUDE_BITS = 0x7FFFF000


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """density: share of the values that is sent, rounded to an even number k of a chunk; (2.5 k + 2) / 4096 bytes a value."""

    density: float = 1 / 64
    stochastic: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")

    @property
    def k(self) -> int:
        return max(2, 2 * round(self.density * CHUNK / 2))

    @property
    def unit(self) -> int:
        return CHUNK

    def sections(self, numel: int) -> tuple[int, ...]:
        chunks = -(-numel // CHUNK)
        return 2 * chunks, self.k * chunks, 3 * self.k // 2 * chunks

    def kernel(self, size: int, device: torch.device) -> Kernel:
        return TopKKernel(size, self.k, self.stochastic, device)


class TopKKernel(Kernel):
    """Selects by keys that hold the magnitude above and the place below, so that no two are equal."""

    def __init__(self, size: int, k: int, stochastic: bool, device: torch.device) -> None:
        rows = size // CHUNK
        self.size = size
        self._k = k
        self._shape = (rows, CHUNK)
        self._quantizer = Quantizer(rows * k, k, 127, stochastic, device)
        self._backwards = torch.arange(CHUNK - 1, -1, -1, dtype=torch.int32, device=device)
        self._keys = torch.empty(self._shape, dtype=torch.int32, device=device)
        self._top = torch.empty(rows, k, dtype=torch.int32, device=device)
        self._places = torch.empty(rows, k, dtype=torch.int64, device=device)
        self._values = torch.empty(rows, k, device=device)
        self._codes = torch.empty(rows * k, dtype=torch.int8, device=device)
        self._bytes = torch.empty(rows * k // 2, 3, dtype=torch.uint8, device=device)
        self._low, self._high = torch.empty(2, rows * k // 2, dtype=torch.int32, device=device)
        self._magnitude = int32(MAGNITUDE_BITS, device)
        self._four, self._eight, self._fifteen = (int32(n, device) for n in (4, 8, 15))
        scales = self._quantizer.wire_scales.view(torch.uint8)
        self.sections = (scales, self._codes.view(torch.uint8), self._bytes.view(-1))

    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        rows = values.view(self._shape)
        torch.bitwise_and(rows.view(torch.int32), self._magnitude, out=self._keys)
        self._keys.bitwise_or_(self._backwards)
        torch.topk(self._keys, self._k, dim=1, sorted=True, out=(self._top, self._places))
        torch.gather(rows, 1, self._places, out=self._values)
        position = first // CHUNK * self._k
        self._codes.copy_(self._quantizer.quantize(self._values.view(-1), seed, position))
        self._pack_places()

    def decode(self, out: torch.Tensor) -> None:
        self._unpack_places()
        values = self._values.view(-1).copy_(self._codes)
        self._quantizer.scale(values, values)
        out.zero_().view(self._shape).scatter_(1, self._places, self._values)

    def _pack_places(self) -> None:
        pairs = self._places.view(-1, 2)
        low, high, bytes_ = self._low, self._high, self._bytes
        # A copy to uint8 keeps the low eight bits.
        low.copy_(pairs[:, 0])
        bytes_[:, 0].copy_(low)
        low.bitwise_right_shift_(self._eight)
        high.copy_(pairs[:, 1]).bitwise_and_(self._fifteen).bitwise_left_shift_(self._four)
        bytes_[:, 1].copy_(low.bitwise_or_(high))
        high.copy_(pairs[:, 1])
        bytes_[:, 2].copy_(high.bitwise_right_shift_(self._four))

    def _unpack_places(self) -> None:
        pairs = self._places.view(-1, 2)
        low, high, bytes_ = self._low, self._high, self._bytes
        high.copy_(bytes_[:, 1]).bitwise_and_(self._fifteen).bitwise_left_shift_(self._eight)
        low.copy_(bytes_[:, 0]).bitwise_or_(high)
        pairs[:, 0].copy_(low)
        high.copy_(bytes_[:, 1]).bitwise_right_shift_(self._four)
        low.copy_(bytes_[:, 2]).bitwise_left_shift_(self._four).bitwise_or_(high)
        pairs[:, 1].copy_(low)
