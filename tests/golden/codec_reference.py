"""The wire codecs written out in NumPy, to check ours bit for bit. Imports nothing of ours.

Slow and literal on purpose: levels are looked up among the levels, places are sorted with a general sort, bytes are put
together with Python's own integers where that is plain.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

F32 = np.float32
CHUNK = 4096

Draw = Callable[[int, int], np.ndarray]
"""(first position, count) -> that many 32-bit numbers."""


@dataclass(frozen=True)
class Wire:
    """A codec by the name a configuration gives it. block: values per scale; density: of topk. None: its default."""

    name: str
    block: int | None = None
    density: float | None = None
    stochastic: bool = False

    @property
    def values_per_scale(self) -> int:
        return self.block or {"int8": 64, "int4": 64, "fp4_e3m0": 32}[self.name]

    @property
    def k(self) -> int:
        """Values of a chunk that topk sends."""
        return max(2, 2 * round((self.density or 1 / 64) * CHUNK / 2))


def encode(wire: Wire, values: np.ndarray, seed: int = 0) -> np.ndarray:
    """float32 [n] -> uint8 [bytes]. seed: of the noise, where rounding is stochastic."""
    draw = noise(seed) if wire.stochastic else None
    return {
        "fp32": lambda: raw(values.astype("<f4")),
        "bf16": lambda: raw((rounded_to_bf16(values, draw).view(np.uint32) >> 16).astype("<u2")),
        "int8": lambda: encode_integers(values, wire.values_per_scale, 127, draw),
        "int4": lambda: encode_integers(values, wire.values_per_scale, 7, draw),
        "fp4_e3m0": lambda: encode_fp4(values, wire.values_per_scale, draw),
        "topk": lambda: encode_topk(values, wire.k, draw),
    }[wire.name]()


def decode(wire: Wire, buffer: np.ndarray, numel: int) -> np.ndarray:
    """uint8 [bytes] -> float32 [numel]."""
    return {
        "fp32": lambda: buffer.view("<f4").astype(F32),
        "bf16": lambda: widened(buffer.view("<u2")),
        "int8": lambda: decode_integers(buffer, numel, wire.values_per_scale, 127),
        "int4": lambda: decode_integers(buffer, numel, wire.values_per_scale, 7),
        "fp4_e3m0": lambda: decode_fp4(buffer, numel, wire.values_per_scale),
        "topk": lambda: decode_topk(buffer, numel, wire.k),
    }[wire.name]()


# ---- noise -----------------------------------------------------------------------------------------------------------


def noise_seed(run: str, slot: int, fragment: int, island: int) -> int:
    digest = hashlib.blake2b(f"{slot}:{fragment}:{island}:{run}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def noise(seed: int) -> Draw:
    low, high = np.uint64(seed % 2**32), np.uint64(seed >> 32)
    word = np.uint64(2**32 - 1)

    def draw(first: int, count: int) -> np.ndarray:
        z = (np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B9) + low) & word
        z ^= z >> np.uint64(16)
        z = (z * np.uint64(0x7FEB352D)) & word
        z ^= high
        z ^= z >> np.uint64(15)
        return (z * np.uint64(0x846CA68B)) & word

    return draw


# ---- bfloat16, half bytes, blocks ------------------------------------------------------------------------------------


def raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def rounded_to_bf16(values: np.ndarray, draw: Draw | None = None) -> np.ndarray:
    """To the nearest, ties to even; with noise, up with the odds of what is cut off. Finite values only."""
    bits = values.view(np.uint32).astype(np.uint64)
    up = draw(0, len(values)) >> np.uint64(16) if draw else 0x7FFF + ((bits >> 16) & 1)
    return ((bits + up) & 0xFFFF0000).astype(np.uint32).view(F32)


def next_bf16(value: np.float32) -> np.float32:
    """The smallest bfloat16 that is not below a positive value."""
    cut = np.frombuffer(np.uint32(int(value.view(np.uint32)) >> 16 << 16).tobytes(), F32)[0]
    if cut == value:
        return cut
    return np.frombuffer(np.uint32(((int(value.view(np.uint32)) >> 16) + 1) << 16).tobytes(), F32)[0]


def widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(F32)


def halves_joined(codes: list[int]) -> np.ndarray:
    """Two codes a byte, the first of a pair in the low half; a missing last one is 0."""
    codes = [code & 15 for code in codes] + [0] * (len(codes) % 2)
    return np.array([a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)], np.uint8)


def halves_split(buffer: np.ndarray, numel: int) -> np.ndarray:
    return np.array([part for byte in buffer.tolist() for part in (byte & 15, byte >> 4)][:numel], int)


def blocks(values: np.ndarray, block: int) -> list[np.ndarray]:
    return [values[i : i + block] for i in range(0, len(values), block)]


# ---- int8 and int4 ---------------------------------------------------------------------------------------------------


def scale_of(block: np.ndarray, qmax: int) -> np.float32:
    largest = np.max(np.abs(block))
    if largest < F32(2.0**-100):
        return F32(0)
    scale = next_bf16(largest * F32(1 / qmax))
    while float(scale) * qmax > float(np.finfo(F32).max):  # only at the very end of float32's range
        scale = np.frombuffer(np.uint32(int(scale.view(np.uint32)) - 0x10000).tobytes(), F32)[0]
    return scale


def integers(block: np.ndarray, scale: np.float32, qmax: int, bits: np.ndarray | None) -> list[int]:
    """bits: 32 random ones for each value, or None for rounding to the nearest."""
    if scale == 0:
        return [0] * len(block)
    scaled = block * (F32(1) / scale)
    if bits is None:
        return [int(q) for q in np.rint(scaled)]
    uniform = (bits >> np.uint64(8)).astype(F32) * F32(2.0**-24)
    return [max(-qmax, min(qmax, int(q))) for q in np.floor(scaled + uniform)]


def encode_integers(values: np.ndarray, block: int, qmax: int, draw: Draw | None) -> np.ndarray:
    scales, codes = [], []
    for i, part in enumerate(blocks(values, block)):
        scales.append(scale_of(part, qmax))
        codes += integers(part, scales[-1], qmax, draw(i * block, len(part)) if draw else None)
    head = raw((np.array(scales, F32).view(np.uint32) >> 16).astype("<u2"))
    return np.concatenate([head, halves_joined(codes) if qmax == 7 else raw(np.array(codes, np.int8))])


def decode_integers(buffer: np.ndarray, numel: int, block: int, qmax: int) -> np.ndarray:
    count = -(-numel // block)
    scales = widened(buffer[: 2 * count].copy().view("<u2"))
    if qmax == 7:
        codes = halves_split(buffer[2 * count :], numel)
        codes = np.where(codes > 7, codes - 16, codes)
    else:
        codes = buffer[2 * count :].view(np.int8)
    return codes.astype(F32) * np.repeat(scales, block)[:numel]


# ---- fp4 -------------------------------------------------------------------------------------------------------------

LEVELS = np.array([0, 1, 2, 4, 8, 16, 32, 64], F32)  # in smallest levels
HALFWAY = np.array([0.5, 1.5, 3, 6, 12, 24, 48], F32)  # from here on the next level


def fp4_scale_byte(block: np.ndarray, up: bool) -> int:
    """127 plus the exponent of the power of two nearest to the largest magnitude (halfway goes up), or not below it."""
    mantissa, exponent = np.frexp(
        np.max(np.abs(block))
    )  # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1)
    if mantissa == 0 or exponent < -125:  # subnormal: 2^-126 is the only power near enough to be rounded to
        return int(mantissa != 0 and (up or exponent == -126))
    lower = mantissa == F32(0.5) if up else mantissa < F32(0.75)
    return min(254, 127 + int(exponent) - int(lower))


def fp4_codes(block: np.ndarray, scale_byte: int, bits: np.ndarray | None) -> list[int]:
    """bits: 32 random ones for each value, or None for rounding to the nearest."""
    if scale_byte < 7:
        return [8 * int(sign) for sign in np.signbit(block)]
    y = np.minimum(np.abs(block) * F32(2.0 ** (133 - scale_byte)), LEVELS[-1])
    # Below the smallest level y is seen as y + 1, rounded to float32.
    seen = np.where(y < 1, (y + F32(1)) - F32(1), y)
    if bits is None:
        codes = np.searchsorted(HALFWAY, seen, side="right")
    else:
        codes = np.searchsorted(LEVELS, seen, side="right") - 1
        above = np.where(
            codes == 0, seen, seen / LEVELS[np.maximum(codes, 1)] - F32(1)
        )  # of the gap, in [0, 1)
        codes += (above.astype(np.float64) * 2**23).astype(np.uint64) + (bits >> np.uint64(9)) >= 2**23
    return [int(c) | 8 * int(sign) for c, sign in zip(codes, np.signbit(block), strict=True)]


def encode_fp4(values: np.ndarray, block: int, draw: Draw | None) -> np.ndarray:
    head, codes = [], []
    for i, part in enumerate(blocks(values, block)):
        head.append(fp4_scale_byte(part, up=draw is not None))
        codes += fp4_codes(part, head[-1], draw(i * block, len(part)) if draw else None)
    return np.concatenate([np.array(head, np.uint8), halves_joined(codes)])


def decode_fp4(buffer: np.ndarray, numel: int, block: int) -> np.ndarray:
    count = -(-numel // block)
    codes = halves_split(buffer[count:], numel)
    smallest = np.array(
        [0.0 if e < 7 else np.nan if e == 255 else 2.0 ** (e - 133) for e in buffer[:count].tolist()], F32
    )
    signs = np.where(codes & 8, F32(-1), F32(1))
    return signs * LEVELS[codes & 7] * np.repeat(smallest, block)[:numel]


# ---- topk ------------------------------------------------------------------------------------------------------------


def encode_topk(values: np.ndarray, k: int, draw: Draw | None) -> np.ndarray:
    scales, codes, packed = [], [], []
    padded = np.concatenate([values, np.zeros(-len(values) % CHUNK, F32)])
    for i, chunk in enumerate(blocks(padded, CHUNK)):
        coarse = chunk.view(np.uint32) & np.uint32(0x7FFFF000)
        places = np.lexsort((np.arange(CHUNK), -coarse.astype(np.int64)))[:k]
        scales.append(scale_of(chunk[places], 127))
        codes += integers(chunk[places], scales[-1], 127, draw(i * k, k) if draw else None)
        for p, q in zip(places[::2].tolist(), places[1::2].tolist(), strict=True):
            packed.append((p | q << 12).to_bytes(3, "little"))
    head = raw((np.array(scales, F32).view(np.uint32) >> 16).astype("<u2"))
    return np.concatenate([head, raw(np.array(codes, np.int8)), np.frombuffer(b"".join(packed), np.uint8)])


def decode_topk(buffer: np.ndarray, numel: int, k: int) -> np.ndarray:
    chunks = -(-numel // CHUNK)
    scales = widened(buffer[: 2 * chunks].copy().view("<u2"))
    codes = buffer[2 * chunks : (2 + k) * chunks].view(np.int8).reshape(chunks, k)
    triples = buffer[(2 + k) * chunks :].reshape(chunks, k // 2, 3)
    out = np.zeros((chunks, CHUNK), F32)
    for chunk in range(chunks):
        for i, triple in enumerate(triples[chunk]):
            both = int.from_bytes(triple.tobytes(), "little")
            for j, place in ((2 * i, both & 0xFFF), (2 * i + 1, both >> 12)):
                out[chunk, place] = F32(codes[chunk, j]) * scales[chunk]
    return out.reshape(-1)[:numel]
