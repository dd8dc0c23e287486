"""One flat tensor as a safetensors file, written and read piece by piece: neither side holds the file beside the tensor."""

import json
import math
from collections.abc import Iterator

import torch

from torchtitan_diloco.outer import buffers

PIECE = 1 << 20  # bytes
HEADER_LIMIT = 1 << 16  # bytes; of one tensor it takes some 100
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def _head(name: str, tensor: torch.Tensor) -> bytes:
    entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    text = json.dumps({name: entry}).encode()
    text += b" " * (-len(text) % 8)  # the values are aligned
    return len(text).to_bytes(8, "little") + text


def length(name: str, tensor: torch.Tensor) -> int:
    """Bytes that ``write`` gives."""
    return len(_head(name, tensor)) + tensor.nbytes


def write(name: str, tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    """The file. tensor: contiguous, on the CPU, not changed meanwhile."""
    yield _head(name, tensor)
    values = tensor.view(torch.uint8).numpy().data
    for start in range(0, len(values), PIECE):
        yield values[start : start + PIECE]


def read(name: str, pieces: Iterator[bytes]) -> tuple[torch.Tensor, int]:
    """The flat tensor of that name, which is all that the file holds, and the file's length.

    Raises ValueError when it is anything else, before any memory is taken for it, or when it ends early.
    """
    start = b""
    while len(start) < 8 or len(start) < 8 + _head_length(start):
        piece = next(pieces, None)
        if piece is None:
            raise ValueError(f"{name} ends in its header")
        start += piece
    at = 8 + _head_length(start)
    flat = buffers.empty(*_described(name, start[8:at]))
    values = flat.view(torch.uint8).numpy().data
    filled, piece = 0, start[at:]
    while piece is not None:
        if filled + len(piece) > len(values):
            raise ValueError(f"{name} is longer than its header says")
        values[filled : filled + len(piece)] = piece
        filled += len(piece)
        piece = next(pieces, None)
    if filled < len(values):
        raise ValueError(f"{name} ends after {filled} of {len(values)} bytes")
    return flat, at + filled


def _head_length(start: bytes) -> int:
    count = int.from_bytes(start[:8], "little")
    if count > HEADER_LIMIT:
        raise ValueError(f"a header of {count} bytes is none of ours")
    return count


def _described(name: str, head: bytes) -> tuple[int, torch.dtype]:
    """Elements and dtype of the one flat tensor that a header describes."""
    try:
        entry = json.loads(head)[name]
        shape, dtype, offsets = entry["shape"], DTYPES[entry["dtype"]], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the header of {name} is malformed") from error
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 0:
        raise ValueError(f"{name} has shape {shape}, which is not flat")
    if offsets != [0, math.prod(shape) * dtype.itemsize]:
        raise ValueError(f"{name} has {shape[0]} values at bytes {offsets}")
    return shape[0], dtype
