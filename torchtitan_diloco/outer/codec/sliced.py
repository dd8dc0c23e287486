"""A plan for tensors whose slices are encoded apart, so that each can be sent to another island."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchtitan_diloco.outer.codec.codec import Codec, Plan, check_flat
from torchtitan_diloco.outer.values import Values


@dataclass(frozen=True, slots=True)
class Slice:
    """Values ``start : stop`` of the tensor, at bytes ``low : high`` of the encoding."""

    start: int
    stop: int
    low: int
    high: int
    plan: Plan

    @property
    def nbytes(self) -> int:
        return self.high - self.low


class SlicedPlan:
    """Like ``Plan``; the encoding is that of every slice, one after the other, and decodes to what an uncut one would.

    With one slice it is the same bytes as well. One thread at a time may use it.
    """

    def __init__(self, codec: Codec, ranges: Sequence[tuple[int, int]]) -> None:
        """ranges: of the slices, without gaps, from 0 on, cut at multiples of the codec's unit."""
        plans = {stop - start: codec.prepare(stop - start) for start, stop in ranges}
        self.codec = codec
        self.dtype = torch.float32
        self.numel = ranges[-1][1]
        slices, low = [], 0
        for start, stop in ranges:
            plan = plans[stop - start]
            slices.append(Slice(start, stop, low, low + plan.nbytes, plan))
            low += plan.nbytes
        self.slices = tuple(slices)
        self.nbytes = low
        self.in_place = codec.is_plain  # as in ``Plan``

    def encode(
        self,
        values: torch.Tensor | Values,
        buffer: torch.Tensor,
        seed: int | None = None,
        error: torch.Tensor | None = None,
    ) -> None:
        """As ``Plan.encode``."""
        self.check(values, buffer, seed)
        if error is not None:
            check_flat(error, torch.float32, self.numel)
        for s in self.slices:
            lost = None if error is None else error[s.start : s.stop]
            mine = values[s.start : s.stop] if isinstance(values, torch.Tensor) else values
            s.plan.encode(mine, buffer[s.low : s.high], seed, lost, first=s.start)

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """As ``Plan.decode``."""
        check_flat(buffer, torch.uint8, self.nbytes)
        check_flat(out, torch.float32, self.numel)
        for s in self.slices:
            s.plan.decode(buffer[s.low : s.high], out[s.start : s.stop])

    def weighted_sum(
        self, buffers: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor
    ) -> None:
        """As ``Plan.weighted_sum``."""
        for _ in self.sum_by_pieces(buffers, shares, out):
            pass

    def sum_by_pieces(
        self, buffers: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor
    ) -> Iterator[slice]:
        """As ``Plan.sum_by_pieces``."""
        for buffer in buffers:
            check_flat(buffer, torch.uint8, self.nbytes)
        check_flat(out, torch.float32, self.numel)
        for s in self.slices:
            parts = [buffer[s.low : s.high] for buffer in buffers]
            for piece in s.plan.sum_by_pieces(parts, shares, out[s.start : s.stop]):
                yield slice(s.start + piece.start, s.start + piece.stop)

    def check(self, values: torch.Tensor | Values, buffer: torch.Tensor, seed: int | None) -> None:
        """Raise ValueError where ``encode`` would."""
        if isinstance(values, torch.Tensor):
            check_flat(values, torch.float32, self.numel)
        check_flat(buffer, torch.uint8, self.nbytes)
        if self.codec.stochastic and seed is None:
            raise ValueError("stochastic rounding needs a seed")
