"""What the codecs share that give each block of consecutive values one scale."""

from dataclasses import dataclass

from torchtitan_diloco.outer.codec.codec import Codec
from torchtitan_diloco.outer.names import LARGEST_BLOCK


@dataclass(frozen=True, slots=True)
class BlockCodec(Codec):
    """A scale for each ``block`` values. Raises ValueError unless block is an even number from 2 to 65536."""

    block: int = 64
    stochastic: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.block <= LARGEST_BLOCK or self.block % 2:
            raise ValueError(f"block must be an even number from 2 to {LARGEST_BLOCK}, got {self.block}")

    @property
    def unit(self) -> int:
        return self.block
