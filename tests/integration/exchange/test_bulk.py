"""Bulk between gateways without their protocol: order, parts of any length, several fragments at once, and a cut link."""

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cuts import cut_gloo
from tests.integration.exchange.test_gloo_transport import together
from torchtitan_diloco.config.rules import MESSAGE_MBIT
from torchtitan_diloco.exchange import bulk
from torchtitan_diloco.exchange.attempt import Bulk
from torchtitan_diloco.exchange.bulk import GlooBulk
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.exchange.traffic import Traffic
from torchtitan_diloco.outer.policy import Member

CHUNK = 1000
PATIENCE_S = 10.0
Sizes = list[list[int]]
"""By sender and receiver."""


def contents(sender: int, receiver: int, fragment: int, size: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * fragment + 10 * sender + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed)


class Ends:
    """The bulk's ends of all members."""

    def __init__(self, count: int, streams: int = 1) -> None:
        self.members = tuple(Member(i, f"start-{i}") for i in range(count))
        self.traffic = [Traffic() for _ in self.members]
        self.ends = [GlooBulk("127.0.0.1", PATIENCE_S, 0.0, traffic, streams) for traffic in self.traffic]

    def exchange(self, slot: int, fragment: int, sizes: Sizes, member: int) -> dict[int, torch.Tensor]:
        effect = Bulk(
            (slot, "epoch"), "whole", fragment, self.members, whole=True,
            sends=tuple(contents(member, to, fragment, size) for to, size in enumerate(sizes[member])),
            sizes=tuple(row[member] for row in sizes),
        )  # fmt: skip
        return self.ends[member].exchange(self.members[member], effect, self.ends[0].address)

    def calls(self, slot: int, fragment: int, sizes: Sizes) -> list[Callable[[], dict[int, torch.Tensor]]]:
        for traffic in self.traffic:
            traffic.open(slot)
        return [partial(self.exchange, slot, fragment, sizes, m) for m in range(len(self.members))]


def broken(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        call()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK", CHUNK)


@pytest.mark.parametrize("streams", [1, 3])
def test_parts_of_any_length_of_several_fragments_at_once_arrive_whole_and_are_counted(streams: int) -> None:
    ends = Ends(3, streams)
    table = {
        0: [[5, 1000, 1001], [0, 7, 20_003], [1, 0, 0]],
        1: [[0, 999, 30_000], [30_000, 0, 2500], [1, 2000, 0]],
        2: [[0, 1, 1], [1, 0, 1], [1, 1, 0]],
    }
    for turn in range(2):  # the second on the groups of the first
        slots = {3 * turn + fragment: fragment for fragment in table}
        got = together(
            *(c for slot, fragment in slots.items() for c in ends.calls(slot, fragment, table[fragment]))
        )
        for slot, fragment in slots.items():
            for member in range(3):
                parts = got.pop(0)
                assert isinstance(parts, dict)
                for sender, part in parts.items():
                    assert torch.equal(
                        part, contents(sender, member, fragment, table[fragment][sender][member])
                    )
                others = [m for m in range(3) if m != member]
                assert ends.traffic[member].close(slot) == (
                    sum(table[fragment][member][m] for m in others),
                    sum(table[fragment][m][member] for m in others),
                )


def test_everything_is_asked_for_before_the_first_byte_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a chunk waits, on a long link, until what is queued before its request has crossed the other way.
    ends = Ends(2)
    log: list[str] = []
    begin = ends.ends[0]._begin

    def noted(*arguments: object) -> object:
        (group,) = begin(*arguments)
        for name in ("recv", "send"):
            call = getattr(group, name)
            monkeypatch.setattr(group, name, lambda *a, n=name, c=call: log.append(n) or c(*a))
        return [group]

    monkeypatch.setattr(ends.ends[0], "_begin", noted)
    together(*ends.calls(0, 0, [[0, 20_500], [40_500, 0]]))
    assert log == ["recv"] * 41 + ["send"] * 21


def test_the_rule_for_max_rate_knows_how_long_a_message_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert bulk.CHUNK * 8 == MESSAGE_MBIT * 1e6


def test_an_abandoned_attempt_leaves_the_link_to_its_successor() -> None:
    ends = Ends(2)
    sizes = [[0, 40_000], [40_000, 0]]  # 4 s at the rate
    for end in ends.ends:
        end._bucket = TokenBucket(10_000)
    began = time.monotonic()

    def give_up() -> None:
        time.sleep(1.0)
        for end in ends.ends:
            end.abandon((0, "epoch"))

    together(give_up, *(partial(broken, call) for call in ends.calls(0, 0, sizes)))
    assert time.monotonic() - began < 3.0
    sent = [traffic.close(0)[0] for traffic in ends.traffic]
    assert all(0 < count < 30_000 for count in sent)
    for end in ends.ends:
        end.settled(0)
        assert not end._abandoned
    assert all(isinstance(parts, dict) for parts in together(*ends.calls(1, 0, [[0, 5000], [5000, 0]])))


@pytest.mark.parametrize("streams", [1, 3])
def test_what_had_arrived_when_the_link_was_cut_is_counted_and_the_other_members_are_not_waited_for(
    streams: int,
) -> None:
    ends = Ends(3, streams)
    lowest, silent = ends.ends[0], 2
    sizes = [[0 if a == b else 20_000 for b in range(3)] for a in range(3)]
    keep = {int(end.address.rsplit(":", 1)[1]) for end in ends.ends}
    taken: list[float] = []
    cut = threading.Event()

    def cut_after_seven(size: float) -> None:
        taken.append(size)
        if len(taken) == 7:
            time.sleep(0.5)  # those of the other member are all here by then
            cut_gloo(keep)
            cut.set()

    lowest._bucket.take = cut_after_seven  # type: ignore[method-assign]
    ends.ends[silent]._bucket.take = lambda size: cut.wait(PATIENCE_S)  # type: ignore[method-assign]

    began = time.monotonic()
    together(*(partial(broken, call) for call in ends.calls(0, 0, sizes)))
    assert time.monotonic() - began < PATIENCE_S / 2
    sent, received = ends.traffic[0].close(0)
    assert sent == sum(taken) and 7 * 2 * CHUNK <= sent <= 2 * 20_000
    assert received == 20_000


def test_when_one_stream_breaks_the_attempt_fails_and_the_next_one_begins_on_new_streams() -> None:
    ends = Ends(2, streams=3)
    begin, numbers = ends.ends[0]._begin, itertools.count()
    held: list[list[int]] = []

    def noted(*arguments: Any) -> list[Any]:
        groups = begin(*arguments)
        # Not the groups: whoever holds them keeps their connections open.
        held.append([vars(group).setdefault("number", next(numbers)) for group in groups])
        return groups

    ends.ends[0]._begin = noted  # type: ignore[method-assign]
    sizes = [[0, 30_500], [30_500, 0]]
    together(*ends.calls(0, 0, sizes))
    keep, before = {port for end in ends.ends for port in [int(end.address.rsplit(":", 1)[1])]}, held[-1]
    cuts: list[int] = []
    ends.ends[0]._bucket.take = lambda size: cuts or cuts.append(cut_gloo(keep, at_most=1))  # type: ignore[method-assign]
    began = time.monotonic()
    together(*(partial(broken, call) for call in ends.calls(1, 0, sizes)))
    assert cuts == [1] and time.monotonic() - began < PATIENCE_S / 2
    assert held[-1] == before, "the groups of the epoch were not kept"
    del ends.ends[0]._bucket.take
    for end in ends.ends:
        end.failed(1)
    for part, sender in zip(together(*ends.calls(2, 0, sizes)), (1, 0), strict=True):
        assert isinstance(part, dict)
        assert torch.equal(part[sender], contents(sender, 1 - sender, 0, 30_500))
    assert len(held[-1]) == 3 and not set(held[-1]) & set(before)


def test_small_parts_are_dealt_to_all_streams_but_not_ground_to_dust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK", 1 << 20)
    (end,) = Ends(1, streams=4).ends
    lengths = {
        size: [p.numel() for p in end._cut(torch.empty(size, dtype=torch.uint8))]
        for size in (0, 9, 600_000, 3 << 20, 9 << 20)
    }
    assert lengths[0] == [] and lengths[9] == [9]
    assert lengths[600_000] == [1 << 18, 1 << 18, 600_000 - (1 << 19)]
    assert lengths[3 << 20] == [3 << 18] * 4
    assert lengths[9 << 20] == [1 << 20] * 9


def test_the_threads_of_streams_end_with_them() -> None:
    def threads() -> int:
        return psutil.Process().num_threads()

    ends = Ends(2, streams=4)
    together(*ends.calls(0, 0, [[0, 10], [10, 0]]))
    one = threads()
    for slot in range(1, 4):
        together(*ends.calls(slot, slot, [[0, 10], [10, 0]]))
    four = threads()
    for slot in range(4):
        for end in ends.ends:
            end.failed(slot)
    others = 8  # of the process, which come and go
    assert four - one <= 3 * 2 * 4 * 3 + others, "threads of a group"
    assert threads() <= one + others
