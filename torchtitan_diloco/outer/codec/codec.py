"""What a codec is, and the plan that walks it over a long tensor in pieces that stay in the processor's cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from torchtitan_diloco.outer.pieces import PIECE
from torchtitan_diloco.outer.values import Values

CACHED_VALUES = PIECE
"""Values a CPU works on at a time."""

LAUNCHED_VALUES = 1 << 24
"""Values an accelerator works on at a time: there the price is a kernel launch, and 256 MB of scratch are cheap."""


class Kernel(ABC):
    """The arithmetic of a codec on exactly ``size`` values (a multiple of the codec's unit), and its scratch.

    sections: uint8 tensors, one for each section of the codec's layout, that ``encode`` fills and ``decode`` reads.
    """

    size: int
    sections: tuple[torch.Tensor, ...]

    @abstractmethod
    def encode(self, values: torch.Tensor, seed: int, first: int) -> None:
        """values: float32 ``[size]``, left as they are. first: their position in the whole tensor, for the noise."""

    @abstractmethod
    def decode(self, out: torch.Tensor) -> None:
        """out: float32 ``[size]``, overwritten."""


class Codec(ABC):
    """Settings of one encoding. Immutable, and equal on every island of a run.

    An encoding is a row of sections (such as: all scales, then all codes), without padding between them.
    """

    stochastic: bool = False
    """Whether rounding draws noise, so that ``Plan.encode`` needs a seed."""

    is_plain: bool = False
    """Whether an encoding is the float32 values themselves."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Values that cannot be encoded apart: a tensor may be cut at multiples of it."""

    @abstractmethod
    def sections(self, numel: int) -> tuple[int, ...]:
        """Bytes of each section for ``numel`` values; linear in ``numel`` between multiples of ``unit``."""

    @abstractmethod
    def kernel(self, size: int, device: torch.device) -> Kernel:
        """Allocate what it takes to work on ``size`` values, a multiple of ``unit``."""

    def nbytes(self, numel: int) -> int:
        """Exact length of the encoding of ``numel`` values, whatever the values are."""
        return sum(self.sections(numel))

    def prepare(
        self, numel: int, device: torch.device | str = "cpu", cached_values: int | None = None
    ) -> "Plan":
        """A plan for tensors of ``numel`` values on ``device``; all scratch is allocated here.

        cached_values: values worked on at a time (default: by kind of device). Changes speed and scratch, never a bit.
        """
        return Plan(self, numel, torch.device(device), cached_values)


def check_flat(tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise ValueError unless the tensor is contiguous, 1-D, and of this dtype and length."""
    if tensor.dtype != dtype or tensor.shape != (numel,) or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor of shape ({numel},), "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Values ``start : stop`` of the tensor, and the bytes ``low : high`` of the encoding in each section."""

    start: int
    stop: int
    kernel: Kernel
    bytes: tuple[tuple[int, int], ...]


class Plan:
    """Encodes and decodes tensors of one length without allocating. Holds scratch, so one thread at a time may use it.

    Buffers may lie anywhere (no alignment is asked of them). All methods raise ValueError when a tensor has another
    length or dtype than the plan, or is not contiguous.
    """

    def __init__(self, codec: Codec, numel: int, device: torch.device, cached_values: int | None) -> None:
        if numel < 0:
            raise ValueError(f"a tensor cannot have {numel} values")
        if cached_values is None:
            cached_values = CACHED_VALUES if device.type == "cpu" else LAUNCHED_VALUES
        self.codec = codec
        self.numel = numel
        self.dtype = torch.float32
        self.nbytes = codec.nbytes(numel)
        size = max(1, cached_values // codec.unit) * codec.unit
        tail = -(-(numel % size) // codec.unit) * codec.unit
        self._chunks = self._cut(
            size,
            codec.kernel(size, device) if numel >= size else None,
            codec.kernel(tail, device) if tail else None,
        )
        # Behind the last value there stay zeros, which a partial block is encoded with.
        self._padded = torch.zeros(tail, device=device)
        self._share = torch.empty((), device=device)
        self._decoded = torch.empty(size if numel >= size else tail, device=device)
        self._total = torch.empty_like(self._decoded if codec.is_plain else self._share)

    def _cut(self, size: int, full: Kernel | None, tail: Kernel | None) -> tuple[Chunk, ...]:
        lengths = self.codec.sections(self.numel)
        bases = list(accumulate(lengths, initial=0))[:-1]
        chunks = []
        for start in range(0, self.numel, size):
            stop = min(start + size, self.numel)
            kernel = full if stop - start == size else tail
            assert kernel is not None
            low, high = self.codec.sections(start), self.codec.sections(stop)
            places = tuple((b + lo, b + hi) for b, lo, hi in zip(bases, low, high, strict=True))
            chunks.append(Chunk(start, stop, kernel, places))
        return tuple(chunks)

    def encode(
        self,
        values: torch.Tensor | Values,
        buffer: torch.Tensor,
        seed: int | None = None,
        error: torch.Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Encode ``values`` (float32 ``[numel]``, finite) into ``buffer`` (uint8 ``[nbytes]``).

        values: a tensor, or, on a CPU and without error, the whole row that it would be a slice of, from which it is read.

        seed: of the noise, where the codec rounds stochastically (see ``noise_seed``). error: receives
        values - decoded (float32 ``[numel]``; may be ``values`` itself), at less than the price of another decoding.
        first: where the values begin in the tensor that they are a slice of (a multiple of the codec's unit); the noise
        is that of the whole tensor.
        A value that is not finite makes its block (fp32, bf16: itself) decode to non-finite values; it raises nothing.
        """
        self.check(values, buffer, seed)
        if error is not None:
            check_flat(error, torch.float32, self.numel)
            if not isinstance(values, torch.Tensor):
                raise ValueError("what is lost can only be told of a tensor")
        for chunk in self._chunks:
            kernel, here = chunk.kernel, slice(chunk.start, chunk.stop)
            count = chunk.stop - chunk.start
            part = self._part(values, here, first)
            if count != kernel.size:
                self._padded[:count].copy_(part)
                kernel.encode(self._padded, seed or 0, first + chunk.start)
            else:
                kernel.encode(part, seed or 0, first + chunk.start)
            for section, (low, high) in zip(kernel.sections, chunk.bytes, strict=True):
                buffer[low:high].copy_(section[: high - low])
            if error is not None:
                kernel.decode(self._decoded[: kernel.size])
                torch.sub(part, self._decoded[:count], out=error[here])

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite ``out`` (float32 ``[numel]``) with what ``buffer`` (uint8 ``[nbytes]``) says.

        The same bytes give the same bits on every CPU, with any number of threads. Every buffer decodes to something,
        so one that another program made may decode to non-finite values.
        """
        self._decode(buffer, out, None, add=False)

    def decode_scaled(self, buffer: torch.Tensor, share: float, out: torch.Tensor) -> None:
        """``out = share * decoded``, each product rounded to float32."""
        self._decode(buffer, out, share, add=False)

    def decode_add(self, buffer: torch.Tensor, share: float, accumulator: torch.Tensor) -> None:
        """``accumulator += share * decoded``, product and sum each rounded to float32, in one pass over memory."""
        self._decode(buffer, accumulator, share, add=True)

    @property
    def in_place(self) -> bool:
        """Whether the ``out`` of a weighted sum may be the memory of one of its buffers."""
        return self.codec.is_plain

    def weighted_sum(
        self, buffers: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor
    ) -> None:
        """``out = (share_0 * decoded_0 + share_1 * decoded_1) + ...``: ``decode_scaled`` of the first, then ``decode_add``
        of the others in turn, bit for bit, with ``out`` going through memory once."""
        for _ in self.sum_by_pieces(buffers, shares, out):
            pass

    def sum_by_pieces(
        self, buffers: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor
    ) -> Iterator[slice]:
        """``weighted_sum`` at the pace of whoever iterates: each range of ``out``, as soon as its values are there."""
        for buffer in buffers:
            check_flat(buffer, torch.uint8, self.nbytes)
        check_flat(out, torch.float32, self.numel)
        numbers = self._numbers(buffers)
        for chunk in self._chunks:
            target = out[chunk.start : chunk.stop]
            if numbers:
                self._sum_numbers(chunk, numbers, shares, target)
            else:
                for number, (buffer, share) in enumerate(zip(buffers, shares, strict=True)):
                    self._decode_chunk(chunk, buffer, target, share, add=number > 0)
            yield slice(chunk.start, chunk.stop)

    def _numbers(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The buffers as the float32 values that they hold, if there is nothing to decode."""
        if not self.codec.is_plain:
            return []
        size = self.dtype.itemsize
        return [(b if b.data_ptr() % size == 0 else b.clone()).view(self.dtype) for b in buffers]

    def _sum_numbers(
        self, chunk: Chunk, numbers: Sequence[torch.Tensor], shares: Sequence[float], target: torch.Tensor
    ) -> None:
        """A chunk of the sum, written once all of the numbers are read: the target may be among them."""
        here, count = slice(chunk.start, chunk.stop), target.numel()
        total, product = self._total[:count], self._decoded[:count]
        for i, (values, share) in enumerate(zip(numbers, shares, strict=True)):
            last = target if i == len(numbers) - 1 else total
            torch.mul(values[here], self._share.fill_(share), out=product if i else last)
            if i:
                torch.add(total, product, out=last)

    def _decode(self, buffer: torch.Tensor, out: torch.Tensor, share: float | None, *, add: bool) -> None:
        check_flat(buffer, torch.uint8, self.nbytes)
        check_flat(out, torch.float32, self.numel)
        for chunk in self._chunks:
            self._decode_chunk(chunk, buffer, out[chunk.start : chunk.stop], share, add)

    def _decode_chunk(
        self, chunk: Chunk, buffer: torch.Tensor, target: torch.Tensor, share: float | None, add: bool
    ) -> None:
        kernel, count = chunk.kernel, target.numel()
        if share is not None:
            self._share.fill_(share)
        for section, (low, high) in zip(kernel.sections, chunk.bytes, strict=True):
            section[: high - low].copy_(buffer[low:high])
        direct = not add and count == kernel.size
        decoded = target if direct else self._decoded[: kernel.size]
        kernel.decode(decoded)
        if share is not None:
            decoded.mul_(self._share)
        if add:
            target.add_(decoded[:count])
        elif not direct:
            target.copy_(decoded[:count])

    def _part(self, values: torch.Tensor | Values, here: slice, first: int) -> torch.Tensor:
        """Of what is encoded; valid until the next."""
        if isinstance(values, torch.Tensor):
            return values[here]
        part = self._decoded[: here.stop - here.start]
        values.read(slice(first + here.start, first + here.stop), part)
        return part

    def check(self, values: torch.Tensor | Values, buffer: torch.Tensor, seed: int | None) -> None:
        """Raise ValueError where ``encode`` would."""
        if isinstance(values, torch.Tensor):
            check_flat(values, torch.float32, self.numel)
        check_flat(buffer, torch.uint8, self.nbytes)
        if self.codec.stochastic and seed is None:
            raise ValueError("stochastic rounding needs a seed")
