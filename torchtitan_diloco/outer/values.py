"""Long rows of numbers that are read piece by piece, so that what is made from them passes through memory once."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.pieces import pieces


class Values(Protocol):
    """``numel`` numbers, wherever they are or however they are made.

    spare: memory for all of them (``[numel]``) that whoever reads them may fill, with the values themselves too; None where
    there is none.
    """

    @property
    def numel(self) -> int: ...

    @property
    def spare(self) -> torch.Tensor | None: ...

    def read(self, here: slice, out: torch.Tensor) -> None:
        """Write the values at ``here`` to ``out``, of that length."""


class Strung:
    """The values of several 1-D tensors, one after the other, where they are; of any dtype."""

    spare: torch.Tensor | None = None

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._starts = list(accumulate((t.numel() for t in tensors), initial=0))
        self.numel = self._starts.pop()

    def parts(self, here: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """The values at ``here`` as views of the tensors, with their places counted from the start of ``here``."""
        i, done = bisect_right(self._starts, here.start) - 1, here.start
        while done < here.stop:
            start, tensor = self._starts[i], self._tensors[i]
            stop = min(here.stop, start + tensor.numel())
            yield slice(done - here.start, stop - here.start), tensor[done - start : stop - start]
            i, done = i + 1, stop

    def read(self, here: slice, out: torch.Tensor) -> None:
        for place, values in self.parts(here):
            if values.data_ptr() != out[place].data_ptr():
                out[place].copy_(values)


class Flat(Strung):
    """The values of a 1-D tensor, which whoever reads them may overwrite."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self.spare = tensor


def whole(values: Values) -> torch.Tensor:
    """All of the values as one tensor: in their spare memory, else as float32."""
    out = buffers.empty(values.numel) if values.spare is None else values.spare
    for here in pieces(slice(0, values.numel)):
        values.read(here, out[here])
    return out
