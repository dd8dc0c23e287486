"""One seat for each island: who holds it, who has to wait for it, and when it is empty."""

import pytest

from tests.helpers.hub_words import Clock
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.seats import Phase, Seat, Seats
from torchtitan_diloco.outer.policy import Member

OLD, NEW = Member(0, "old"), Member(0, "new")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seats(clock: Clock) -> Seats:
    return Seats(5.0, 600.0, clock)


def test_silence_beyond_the_lease_empties_the_seat(seats: Seats, clock: Clock) -> None:
    seats.take(OLD, 1.0)
    clock.t += 4.9
    seats.hear(OLD, 0.0)
    clock.t += 5.0
    assert seats.expired() == []
    clock.t += 0.1
    (lost,) = seats.expired()
    assert lost.phase is Phase.LOST and "syncer.heartbeat_timeout_s" in lost.why
    assert seats.expired() == []
    with pytest.raises(Refusal, match="given up: not heard") as refusal:
        seats.hear(OLD, 0.0)
    assert refusal.value.kind == "stranger"


def test_an_island_that_beats_but_does_not_train_is_given_up(seats: Seats) -> None:
    seats.take(OLD, 1.0)
    seats.hear(OLD, 601.0)
    (lost,) = seats.expired()
    assert "its training loop has not moved for 601 s (syncer.hang_timeout_s)" in lost.why


def test_a_second_live_copy_is_refused(seats: Seats, clock: Clock) -> None:
    seats.take(OLD, 1.0)
    for _ in range(5):  # it cannot be told from one that has just died, for as long as the lease
        assert "old of island 0 to be gone" in str(seats.take(NEW, 2.0))
        clock.t += 1.0
        seats.hear(OLD, 0.0)
    clock.t += 1.0
    seats.hear(OLD, 0.0)
    with pytest.raises(Refusal, match="old of island 0 is in the run and alive; each island has its own"):
        seats.take(NEW, 2.0)
    assert seats[OLD].phase is Phase.JOINING


def test_a_dead_incarnation_is_replaced(seats: Seats, clock: Clock) -> None:
    seats.take(OLD, 1.0)
    assert isinstance(seats.take(NEW, 2.0), str)
    clock.t += 5.1
    seats.expired()
    seat = seats.take(NEW, 2.0)
    assert isinstance(seat, Seat) and seat.member == NEW
    with pytest.raises(Refusal, match="new of island 0, which is newer than this one"):
        seats.take(OLD, 1.0)
    with pytest.raises(Refusal, match="has not joined"):
        seats.hear(OLD, 0.0)


@pytest.mark.parametrize("reason, phase", [("done", Phase.LEFT), ("failure", Phase.LOST)])
def test_who_has_left_may_come_again_and_be_replaced_at_once(seats: Seats, reason: str, phase: Phase) -> None:
    seats.take(OLD, 1.0)
    assert seats.leave(OLD, reason).phase is phase
    with pytest.raises(Refusal, match=f"given up: {reason}"):
        seats.leave(OLD, reason)
    assert isinstance(seats.take(NEW, 2.0), Seat)


def test_slots_wait_for_members_from_their_first_slot_on_and_for_founders(seats: Seats) -> None:
    for island, phase, first, founder in (
        (0, Phase.MEMBER, 0, False),
        (1, Phase.MEMBER, 7, False),
        (2, Phase.JOINING, 0, False),
        (3, Phase.JOINING, 0, True),
    ):
        seat = seats.take(Member(island, "a"), 1.0)
        assert isinstance(seat, Seat)
        seat.phase, seat.first, seat.founder = phase, first, founder
    assert seats.awaited(6) == [0, 3]
    assert seats.awaited(7) == [0, 1, 3]
