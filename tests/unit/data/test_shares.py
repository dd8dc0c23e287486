"""Who reads what: every stream has one reader at most, whatever islands know, and weights are kept to."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.schedules import source
from torchtitan_diloco.data.mixture import Mixture
from torchtitan_diloco.outer.policy import Header, call_roll
from torchtitan_diloco.outer.shares import compact, expand, owners, share_of, split, stream

HOLDS = {"a": "0-63"}


@given(st.sets(st.integers(0, 200)))
def test_ranges_of_shards_survive_their_short_form(shards: set[int]) -> None:
    assert expand(compact(shards)) == sorted(shards)


@pytest.mark.parametrize("name", ["a", "/3", "a/", "a/-1", "a/x", "a/１"])
def test_what_is_no_stream_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a stream"):
        split(name)


@pytest.mark.parametrize("turn", [0, 1, 5])
def test_members_share_all_shards_evenly(turn: int) -> None:
    members = dict.fromkeys([3, 7, 9], HOLDS)
    shares = {i: share_of(i, HOLDS, members, turn, members) for i in members}
    names = [name for share in shares.values() for name in share.streams]
    assert sorted(names) == sorted(stream("a", k) for k in range(64) if k % 8 != turn)
    assert {len(share.streams) for share in shares.values()} <= {18, 19, 20}
    assert not any(share.guest for share in shares.values())


def test_shards_move_on_with_every_committed_slot_so_that_slow_islands_hold_none_back() -> None:
    members = dict.fromkeys(range(3), HOLDS)
    readers = [owners(members, turn, HOLDS).get("a/5") for turn in range(9)]
    assert readers == [2, 0, 1, 2, 0, None, 2, 0, 1]


def test_only_islands_that_hold_a_shard_read_it() -> None:
    members = {0: {"a": "0-3"}, 1: {"a": "2-5", "b": "0"}, 2: {"b": "0-1"}}
    owner = owners(members, 0, {})
    for name, island in owner.items():
        name, shard = split(name)
        assert shard in expand(members[island].get(name, ""))
    assert set(owner) == {*(stream("a", k) for k in range(6)), "b/0", "b/1"}


def test_a_guest_reads_the_reserve_and_what_belongs_to_members_that_are_gone() -> None:
    members = dict.fromkeys(range(3), HOLDS)
    reserve = {stream("a", shard) for shard in range(0, 64, 8)}
    assert set(share_of(8, HOLDS, members, 0, [0, 1, 2]).streams) == reserve
    few = {"a": "0-6"}  # too few shards to leave some to nobody
    assert share_of(8, few, dict.fromkeys(range(3), few), 0, [0, 1, 2]).streams == ()
    orphans = reserve | {n for n, i in owners(members, 0, HOLDS).items() if i == 1}
    both = [share_of(i, HOLDS, members, 0, [0, 2, 8, 9]) for i in (8, 9)]
    assert all(share.guest for share in both)
    assert {*both[0].streams, *both[1].streams} == orphans
    assert not {*both[0].streams} & {*both[1].streams}
    # A member goes on with its own share, whoever is there: it may have read of it already.
    assert share_of(0, HOLDS, members, 0, [0]) == share_of(0, HOLDS, members, 0, [0, 1, 2])


def header(island: int, positions: dict[str, int], *, guest: bool = False, finite: bool = True) -> Header:
    return Header(island, 0, 0, 0, "d", "l", 0, 4, 40, finite, positions, {}, HOLDS, guest)


def test_of_two_islands_that_read_a_stream_the_member_counts() -> None:
    roll = call_roll({
        0: header(0, {"a/1": 3}, guest=True),
        1: header(1, {"a/1": 5, "a/2": 2}),
        2: header(2, {"a/3": 1}, finite=False),
    })  # fmt: skip
    assert (roll.contributors, roll.listeners, roll.contested, roll.skipped) == ((1,), (0, 2), (0,), (2,))


@pytest.mark.parametrize(
    "values",
    [{"positions": {"a": 1}}, {"positions": {"a/1": -1}}, {"positions": [1]}, {"holds": {"a": "x"}},
     {"positions": {"a/1": True}}, {"skipped": {"a/1": 9}}],
)  # fmt: skip
def test_a_malformed_header_is_refused(values: dict) -> None:
    good = header(0, {"a/1": 3}).to_json()
    assert Header.from_json(good) == header(0, {"a/1": 3})
    with pytest.raises(ValueError, match=r"header field|is not the name|invalid literal|not a range"):
        Header.from_json(good | values)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.9, 0.05), (2.0, 1.0, 0.013)])
def test_any_stretch_of_a_mixture_keeps_to_the_weights(weights: tuple[float, ...]) -> None:
    sources = [source(f"s{i}", 5000, 8, weight=w) for i, w in enumerate(weights)]
    share = [name for s in sources for name in s.streams]
    rng = random.Random(3)
    for length in (50, 500, 5000):
        begin = {name: rng.randrange(3000) for name in share}
        counts = Counter(Mixture(sources, share, begin, phase=1).take(length).source.tolist())
        for index, weight in enumerate(weights):
            assert abs(counts[index] - length * weight / sum(weights)) < 4


def test_a_mixture_goes_on_from_its_positions_as_if_it_had_never_stopped() -> None:
    sources = [source("a", 37, 8, weight=0.7), source("b", 11, 4, weight=0.3)]
    share = [name for s in sources for name in s.streams]
    whole = Mixture(sources, share, {}).take(300)
    first = Mixture(sources, share, {})
    first.take(123)
    rest = Mixture(sources, share, first.positions()).take(177)
    assert (rest.source == whole.source[123:]).all() and (rest.position == whole.position[123:]).all()


def test_a_source_of_weight_zero_is_read_only_alone() -> None:
    sources = [source("a", 37, 8, weight=1.0), source("b", 11, 4, weight=0.0)]
    both = Mixture(sources, [n for s in sources for n in s.streams], {}).take(50)
    assert set(both.source.tolist()) == {0}
    assert set(Mixture(sources, sources[1].streams, {}).take(50).source.tolist()) == {1}
