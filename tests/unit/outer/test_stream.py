"""A tensor on its way to an island that heals: a safetensors file, in pieces."""

import json

import pytest
import safetensors.torch
import torch

from torchtitan_diloco.outer import stream

VALUES = torch.arange(700_000, dtype=torch.float32)  # more than two pieces


def pieces(data: bytes, size: int):
    return iter([data[i : i + size] for i in range(0, len(data), size)])


def file(header: object, values: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_what_is_written_is_a_safetensors_file_and_is_read_back_in_any_pieces(size):
    values = VALUES[: 1000 if size < 10 else None]
    data = b"".join(stream.write("anchor.0", values))
    assert len(data) == stream.length("anchor.0", values)
    assert torch.equal(safetensors.torch.load(data)["anchor.0"], values)
    flat, length = stream.read("anchor.0", pieces(data, size))
    assert torch.equal(flat, values) and flat.dtype == values.dtype and length == len(data)


def test_what_safetensors_writes_is_read():
    data = safetensors.torch.save({"momentum.1": VALUES})
    assert torch.equal(stream.read("momentum.1", pieces(data, 1000))[0], VALUES)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends in its header"),
        (file({"a": ENTRY}, b"")[:20], "ends in its header"),
        ((1 << 40).to_bytes(8, "little"), "none of ours"),
        (file({"a": ENTRY}, b"1234567"), "ends after 7 of 8 bytes"),
        (file({"a": ENTRY}, b"123456789"), "longer"),
        (file({"b": ENTRY}, b"12345678"), "malformed"),
        (file([1], b"12345678"), "malformed"),
        (file({"a": {**ENTRY, "dtype": "I64"}}, b"12345678"), "malformed"),
        (file({"a": {**ENTRY, "shape": [1, 2]}}, b"12345678"), "not flat"),
        (file({"a": {**ENTRY, "shape": [-2]}}, b"12345678"), "not flat"),
        (file({"a": {**ENTRY, "shape": [10**12]}}, b"12345678"), "at bytes"),
        (b"\x02" + bytes(7) + b"\xff\xff", "malformed"),
    ],
)
def test_anything_else_is_refused(data, says):
    with pytest.raises(ValueError, match=says):
        stream.read("a", pieces(data, 5))
