"""The sample order is a permutation that depends on nothing but (n, seed, epoch, position)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.data.order import permute, round_keys

GOLDEN_KEYS = [6235967106033911276, 4964577235801436555]
GOLDEN_20 = [1, 18, 2, 11, 6, 3, 8, 4, 19, 9, 7, 15]
GOLDEN_1000 = [620, 810, 855, 100, 822, 591]
GOLDEN_LARGE = [124698492030, 350438929078, 189306027024]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 20, 1000, 4096, 4097, 65_537])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (7, 3)])
def test_every_epoch_visits_every_item_once(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_any_size_seed_and_epoch_give_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed=seed, epoch=epoch).tolist()) == list(range(n))


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 4097
    orders = [
        permute(np.arange(n), n, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0)]
    ]
    for i, first in enumerate(orders):
        assert np.count_nonzero(first == np.arange(n)) < 12  # about 1 fixed point is expected
        for second in orders[:i]:
            assert np.count_nonzero(first == second) < 12


def test_small_domains_are_shuffled_evenly() -> None:
    """All 6 orders of 3 items come up about equally often over many epochs (expected 500 each, 6 sigma = 122)."""
    orders = [tuple(permute(np.arange(3), 3, seed=5, epoch=epoch).tolist()) for epoch in range(3000)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6 and all(abs(count - 500) < 122 for count in counts), counts


def test_neighbours_are_spread_over_the_whole_range() -> None:
    n = 100_000
    order = permute(np.arange(n), n, seed=0, epoch=0)
    gaps = np.abs(np.diff(order))
    assert abs(gaps.mean() / (n / 3) - 1) < 0.02  # mean distance of two independent uniform draws
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.02


def test_the_order_is_the_same_on_every_platform_and_release() -> None:
    """Pinned values: changing them changes the data order of every run that exists."""
    assert round_keys(0, 0)[:2] == GOLDEN_KEYS
    assert permute(np.arange(12), 20, seed=0, epoch=0).tolist() == GOLDEN_20
    assert permute(np.arange(6), 1000, seed=42, epoch=7).tolist() == GOLDEN_1000
    large = 10**12 + 39
    assert permute([0, 1, large - 1], large, seed=1, epoch=2).tolist() == GOLDEN_LARGE


def test_a_subset_of_positions_gives_the_same_items_as_the_whole() -> None:
    whole = permute(np.arange(1000), 1000, seed=3, epoch=4)
    picked = np.array([[5, 999], [0, 5]])
    np.testing.assert_array_equal(permute(picked, 1000, seed=3, epoch=4), whole[picked])
    assert permute(17, 1000, seed=3, epoch=4) == whole[17]


@pytest.mark.parametrize("positions, n", [([0], 0), ([3], 3), ([-1], 3), ([0], 2**62 + 1)])
def test_positions_and_sizes_out_of_range_are_refused(positions: list[int], n: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        permute(positions, n, seed=0, epoch=0)
