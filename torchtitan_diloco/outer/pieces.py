"""Long tensors in pieces: several operations on one of them find it in the processor's cache, and memory is read once."""

from collections.abc import Iterator

import torch

PIECE = 1 << 17
"""Values that a thread works on at a time: with what else it needs of them, they stay in its cache."""


def piece_length() -> int:
    """Values in a piece that all of torch's threads work on."""
    return PIECE * torch.get_num_threads()


def pieces(whole: slice) -> Iterator[slice]:
    """``whole`` in pieces, the last of which may be shorter."""
    for start in range(whole.start, whole.stop, piece_length()):
        yield slice(start, min(start + piece_length(), whole.stop))
