"""Islands hear of a new epoch one after the other; what is late, or of members that are gone, counts for nothing."""

import torch

from tests.exhaustive.exchange.simulation import founded, fragments_of
from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.exchange.attempt import Abandon, Bulk, Finished, Renew, Send
from torchtitan_diloco.exchange.messages import Announce, Answer, Confirm, Epoch
from torchtitan_diloco.exchange.protocol import SlotProtocol
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.semi_sync.wire import Wire

MEMBERS = tuple(Member(island, "x") for island in range(2))
FIRST, SECOND = Epoch("first", MEMBERS), Epoch("second", MEMBERS)


def header(island: int) -> Header:
    return Header(island, 0, 0, 0, "", "", 0, 4, 40, True, {f"a/{island}": 4}, {}, {"a": "0-4"}, False)


def in_its_bulk() -> SlotProtocol:
    """Island 0 in the bulk of slot 0 under the first epoch, which island 1 has announced to it."""
    wire = Wire(CodecConfig(), MergeConfig(), fragments_of(1), "run", 0)
    protocol = SlotProtocol(MEMBERS[0], wire.merge)
    protocol.enter(FIRST)
    payload = torch.zeros(fragments_of(1)[0].numel).view(torch.uint8)
    protocol.offer(header(0), payload, founded(1).outer_step(0, 0))
    effects = protocol.receive(MEMBERS[1], Announce("first", 0, 1, 0, header(1)))
    assert [type(effect) for effect in effects] == [Bulk]
    return protocol


def left_for_the_second() -> SlotProtocol:
    protocol = in_its_bulk()
    effects = protocol.receive(MEMBERS[1], Announce("second", 0, 2, 0, header(1)))
    assert [type(effect) for effect in effects] == [Abandon]  # and no epoch beyond the second is asked for
    return protocol


def test_the_epoch_that_another_member_is_in_already_is_waited_for() -> None:
    protocol = left_for_the_second()
    assert protocol.tick() == []
    effects = protocol.enter(SECOND)
    assert [type(effect) for effect in effects] == [Send, Bulk]


def test_an_epoch_that_never_comes_is_asked_for_anew() -> None:
    """The view that the other member had was gone again before this island saw it, and so may be its request."""
    protocol = left_for_the_second()
    assert [protocol.tick() for _ in range(3)] == [[], [Renew()], [Renew()]]
    assert [type(effect) for effect in protocol.enter(Epoch("third", MEMBERS))] == [Send]
    assert Renew() not in protocol.tick()


def test_what_a_member_that_is_gone_has_known_counts_for_nothing() -> None:
    """Its late answer once took an island out of an attempt in which the others waited for it, for ever."""
    protocol = in_its_bulk()
    assert protocol.receive(Member(1, "before"), Answer("older", 0, "behind")) == []
    assert protocol.receive(Member(1, "before"), Answer("older", 0, "failed")) == []


def test_an_island_that_is_behind_says_so_to_those_in_the_bulk_with_it() -> None:
    protocol = in_its_bulk()
    abandon, told, finished = protocol.receive(MEMBERS[1], Answer("older", 0, "behind"))
    assert abandon == Abandon((0, "first"))
    assert told == Send(MEMBERS[1], Confirm("first", 0, None, "island is behind"))
    assert isinstance(finished, Finished) and finished.outcome.status == "behind"
