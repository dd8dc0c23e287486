"""Megatron corpora for tests."""

import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    """Documents of sequences of tokens, written byte for byte as Megatron-LM's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    begins, at = [], 0
    for sequence in sequences:
        begins.append(at)
        at += len(sequence) * size
    counts = [0, *np.cumsum([len(document) for document in documents]).tolist()]
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(counts)))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        file.write(struct.pack(f"<{len(sequences)}q", *begins) + struct.pack(f"<{len(counts)}q", *counts))
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    return prefix.with_suffix(".bin")


def some_documents(count: int = 30) -> list[list[list[int]]]:
    rng = np.random.default_rng(5)
    make = lambda: [int(t) for t in rng.integers(2, 99, int(rng.integers(1, 12)))]
    return [[make() for _ in range(int(rng.integers(1, 4)))] for _ in range(count)]
