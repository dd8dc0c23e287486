"""Schedules of faults see planted faults of the protocol, and a failing one gets smaller; so does the account beside them."""

import pytest
import torch

from tests.exhaustive.exchange.account import Account, Work
from tests.exhaustive.exchange.fault_schedules import (
    ANSWER_OF_THE_DEAD,
    BEHIND_AND_SENDING,
    Fault,
    Schedule,
    drawn,
    error_of,
    run_drawn,
    shrunk,
    smaller,
)
from tests.helpers.faults import Fault as Planted
from tests.helpers.faults import plant
from torchtitan_diloco.exchange import memory, protocol
from torchtitan_diloco.exchange.messages import Outcome

NO_FAULT = Schedule(islands=2, slots=1)
HEADER_LOST = Schedule(2, 8, faults={1: Fault("receiver crashes before"), 3: Fault("drop")}, seed=140)
BULK_LOST = Schedule(2, 4, faults={2: Fault("drop")})
SILENT_CONFIRM = Planted(
    "a confirmation that was lost is not said again", protocol,
    "                effects += self._tell(offer, Confirm(offer.epoch.id, offer.slot, offer.digest))",
    "                pass", (Schedule(2, 5, 3, 2, {32: Fault("drop")}, seed=63), "the run does not come to an end"),
)  # fmt: skip

PLANTED: list[Planted[tuple[Schedule, str]]] = [
    SILENT_CONFIRM,
    Planted("a header that was lost is not said again", protocol,
            "                effects += self._tell(offer, self._announcement(offer))", "                pass",
            (HEADER_LOST, "the run does not come to an end")),
    Planted("a contribution merged twice", protocol, "for i in offer.roll.contributors\n        ]",
            "for i in (*offer.roll.contributors, offer.roll.contributors[0])\n        ]",
            (NO_FAULT, "merged something else than what it counted")),
    Planted("a decision before all headers are there", protocol,
            "if any(member not in heard for member in offer.epoch.members):\n            return []\n"
            "        roll = call_roll({m.island: heard[m].header for m in offer.epoch.members})",
            "roll = call_roll({m.island: a.header for m, a in heard.items()})",
            (NO_FAULT, "two digests")),
    Planted("a slot in which an island is behind is over for it", protocol,
            "return min([*self.offers, *self.behind, slot])", "return min([*self.offers, slot])",
            (BEHIND_AND_SENDING, "no slot committed for 14.4 s after the last fault")),
    Planted("a lost bulk is waited for", memory, "BULK_TIMEOUT_S = 5.0", "BULK_TIMEOUT_S = 60.0",
            (BULK_LOST, "no slot committed for 60.2 s after the last fault")),
]  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_seen(planted, monkeypatch):
    schedule, what = planted.case
    schedule.run()
    plant(planted, monkeypatch)
    error = error_of(schedule)
    assert isinstance(error, AssertionError) and what in str(error)


def test_nobody_waits_for_an_island_that_was_told_by_a_dead_one_that_it_is_behind():
    ANSWER_OF_THE_DEAD.run()


def test_a_failing_schedule_gets_as_small_as_it_can_be_and_is_told_in_words(monkeypatch):
    plant(SILENT_CONFIRM, monkeypatch)
    seed = 63
    small = shrunk(drawn(seed))
    assert len(small.faults) == 1 < len(drawn(seed).faults)
    assert error_of(small) is not None
    assert all(error_of(schedule) is None for schedule in smaller(small))
    with pytest.raises(AssertionError) as caught:
        run_drawn(seed)
    told = str(caught.value)
    assert "AssertionError: the run does not come to an end" in told
    assert f"{small}.run() raises AssertionError: the run does not come to an end" in told
    (number,) = small.faults
    assert f"message {number}: drop; Confirm of slot" in told


def test_an_error_that_is_no_assertion_is_told_as_well(monkeypatch):
    commits_too_early = Planted(
        "",
        protocol,
        "if any(island not in offer.confirms for island in offer.roll.members):",
        "if False:",
        None,
    )
    plant(commits_too_early, monkeypatch)
    with pytest.raises(AssertionError, match=r"KeyError: .*\nSchedule\(.*\)\.run\(\) raises KeyError"):
        run_drawn(0)


# ---- the account -------------------------------------------------------------------------------------------------------


DELTA = torch.ones(3)


def offered(account: Account, start: int, end: int, slot: int = 0, value: float = 1.0) -> int:
    return account.offer(Work(0, 1, slot, start, end, 10 * (end - start), torch.full((3,), value)))


def outcome(number: int, slot: int = 0) -> Outcome:
    return Outcome(slot, "committed", participants=(0,), positions={0: {"a/0": number}})


def test_steps_that_follow_one_another_are_counted_once():
    account = Account()
    account.commit("", "one", outcome(offered(account, 0, 4)), DELTA)
    account.commit("one", "two", outcome(offered(account, 4, 12, slot=1), slot=1), DELTA)
    account.commit("", "fork", outcome(offered(account, 2, 8)), DELTA)  # another history


def test_steps_in_two_slots_of_one_history_are_seen():
    account = Account()
    account.commit("", "one", outcome(offered(account, 0, 4)), DELTA)
    with pytest.raises(AssertionError, match="counts steps 3 to 8 of island 0, which are in it up to 4"):
        account.commit("one", "two", outcome(offered(account, 3, 8, slot=1), slot=1), DELTA)


def test_an_offer_of_another_slot_or_with_other_values_is_seen():
    account = Account()
    number = offered(account, 0, 4)
    with pytest.raises(AssertionError, match="slot 1 counted Work"):
        account.commit("", "one", outcome(number, slot=1), DELTA)
    with pytest.raises(AssertionError, match="merged something else"):
        account.commit("", "one", outcome(number), 1.5 * DELTA)


def test_two_islands_that_counted_differently_are_seen():
    account = Account()
    account.commit("", "one", outcome(offered(account, 0, 4)), DELTA)
    with pytest.raises(AssertionError, match="counted"):
        account.commit("", "one", outcome(offered(account, 0, 4)), DELTA)


def test_two_digests_are_seen_although_one_holder_has_moved_on():
    account = Account()
    account.hold(0, 1, "x", incarnation=1, living={1, 2})
    account.hold(0, 2, "y", incarnation=1, living={1, 2})
    account.hold(1, 1, "z", incarnation=2, living={1, 2})
    with pytest.raises(AssertionError, match="version 1 of fragment 0 has two digests"):
        account.hold(0, 1, "other", incarnation=2, living={1, 2})


def test_what_only_the_dead_have_held_binds_nobody():
    account = Account()
    account.hold(0, 1, "x", incarnation=1, living={1, 2})
    account.hold(0, 1, "other", incarnation=2, living={2})
