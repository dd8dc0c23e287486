"""FR-38: which views of a Lighthouse that was away are believed."""

import time

import pytest

from torchtitan_diloco.exchange import membership
from torchtitan_diloco.exchange.membership import Membership, Peer


def peer(island: int, phase: str = "ready", incarnation: str = "first") -> Peer:
    return Peer(island, incarnation, "run", 0.0, phase, 0, "", "", 0, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def members(clock: list[float]) -> Membership:
    """It has seen islands 0 and 1 in quorum 7."""
    assert time.monotonic() == clock[0]
    members = Membership(
        "http://127.0.0.1:1", peer(0), heartbeat_interval_s=1.0, quorum_interval_s=1.0, on_change=lambda view: None,
        hold_s=5.0,
    )  # fmt: skip
    assert quorum(members, 7, peer(0), peer(1))
    members.peers = [peer(0), peer(1)]
    return members


def quorum(members: Membership, number: int, *peers: Peer) -> bool:
    """Whether it is believed."""
    return members._is_believed(number, frozenset(f"{p.island}:{p.incarnation}" for p in peers), list(peers))


def test_fr_38_a_lighthouse_that_was_there_all_the_time_is_believed(members: Membership) -> None:
    assert quorum(members, 8, peer(0))


@pytest.mark.parametrize("lost", [True, False], ids=["its absence was noticed", "it was back at once"])
def test_fr_38_a_new_lighthouse_that_knows_only_this_island_is_not_believed_until_the_others_had_time(
    members: Membership, clock: list[float], lost: bool
) -> None:
    members._was_lost = lost
    assert not quorum(members, 1, peer(0))
    clock[0] += 4.9
    assert not quorum(members, 1, peer(0))
    clock[0] += 0.2
    assert quorum(members, 1, peer(0))


def test_fr_38_it_is_believed_as_soon_as_all_are_there_in_whatever_incarnation(members: Membership) -> None:
    members._was_lost = True
    assert not quorum(members, 1, peer(0))
    assert quorum(members, 2, peer(0), peer(1, incarnation="second"))
    members.peers = [peer(0), peer(1, incarnation="second")]
    assert quorum(members, 3, peer(0))  # from now on it is one like any other


def test_fr_38_islands_that_had_said_goodbye_are_not_waited_for(members: Membership) -> None:
    members.peers = [peer(0), peer(1, phase="left"), peer(2, phase="lost")]
    members._was_lost = True
    assert quorum(members, 1, peer(0))
