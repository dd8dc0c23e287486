"""Two 4-bit codes in a byte, and back to two float32 values by one look-up."""

import torch


class Nibbles:
    """Packs ``size`` codes (even) into ``size / 2`` bytes: the value at the even position in the low four bits.

    levels: the 16 values that codes 0 to 15 stand for.
    """

    def __init__(self, size: int, levels: torch.Tensor, device: torch.device) -> None:
        self.packed = torch.empty(size // 2, dtype=torch.uint8, device=device)
        byte = torch.arange(256)
        pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).to(device, torch.float32)
        self._pairs = pairs.contiguous().view(torch.int64).view(256)
        self._wide = torch.empty(size, dtype=torch.uint8, device=device)
        self._shifted = torch.empty(size // 2, dtype=torch.int16, device=device)
        self._mask = torch.tensor(15, dtype=torch.uint8, device=device)
        self._four = torch.tensor(4, dtype=torch.int16, device=device)
        self._index = torch.empty(size // 2, dtype=torch.int32, device=device)
        self._values = torch.empty(size // 2, dtype=torch.int64, device=device)

    def pack(self, codes: torch.Tensor) -> None:
        """codes: integers ``[size]`` whose low four bits count; the result is in ``packed``."""
        self._wide.copy_(codes)
        self._wide.bitwise_and_(self._mask)
        both = self._wide.view(torch.int16)  # little-endian: the even position is the low byte
        torch.bitwise_right_shift(both, self._four, out=self._shifted)
        self._shifted.bitwise_or_(both)
        self.packed.copy_(self._shifted)

    def unpack(self) -> torch.Tensor:
        """float32 ``[size]``: the levels of ``packed``; valid until next time."""
        self._index.copy_(self.packed)
        torch.index_select(self._pairs, 0, self._index, out=self._values)
        return self._values.view(torch.float32)
