"""Sample order of a run: a keyed permutation of [0, n), a pure function of (n, seed, epoch, position).

Nothing is stored or shuffled in memory, so any island can say at any time which sequence any position stands
for, and a resumed run needs one integer. The bits are our own (integer arithmetic only): no NumPy or PyTorch
generator, whose streams change between releases, takes part.

Method: a balanced Feistel network over the smallest even number of bits that holds n, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): an output >= n goes through the network
again until it is < n. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), keyed
per round. Good shuffling, no cryptography.
"""

import numpy as np
import numpy.typing as npt

ROUNDS = 8
MAX_ITEMS = 1 << 62
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(value: int) -> int:
    """SplitMix64 finaliser on a Python integer, modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same for an array; unsigned array arithmetic wraps modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MUL1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MUL2)
    return values ^ (values >> np.uint64(31))


def round_keys(seed: int, epoch: int) -> list[int]:
    """ROUNDS 64-bit keys; every pair (seed, epoch) gives its own set. Integers are taken modulo 2**64."""
    state = _mix(_mix(seed + _GOLDEN) + epoch)
    keys = []
    for _ in range(ROUNDS):
        state = (state + _GOLDEN) & _MASK
        keys.append(_mix(state))
    return keys


def permute(positions: npt.ArrayLike, n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Items at the given positions of the order of one epoch.

    Args:
        positions: integers in [0, n), any shape.
        n: number of items, 1 <= n <= 2**62.
        seed: of the run.
        epoch: from 0; each has its own order.

    Returns:
        int64 array of the shape of `positions`; over all positions it is a bijection of [0, n).

    Raises:
        ValueError: n or a position is out of range.
    """
    if not 1 <= n <= MAX_ITEMS:
        raise ValueError(f"n must be between 1 and 2**62, not {n}")
    given = np.asarray(positions, dtype=np.int64)
    if given.size and (int(given.min()) < 0 or int(given.max()) >= n):
        raise ValueError(f"positions must be in [0, {n})")

    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, low = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = [np.uint64(key) for key in round_keys(seed, epoch)]

    values = given.astype(np.uint64).reshape(-1)
    todo = np.arange(values.size)
    while todo.size:  # the network's domain is < 4n, so a pass leaves at most three quarters on average
        left, right = values[todo] >> half, values[todo] & low
        for key in keys:
            left, right = right, left ^ (_mix_array(right + key) & low)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= n]
    return values.astype(np.int64).reshape(given.shape)
