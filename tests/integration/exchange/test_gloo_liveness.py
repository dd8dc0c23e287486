"""FR-39: an island that dies, freezes or is cut off in the middle of an exchange costs the others no time-out of gloo."""

import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gateway_process import GatewayProcess, Order, gateways, until
from tests.helpers.lighthouse_process import HEARTBEAT_S, LighthouseProcess
from tests.helpers.wan import emulated_wan, needs_root

EXCHANGE_TIMEOUT_S = 30.0
SLACK_S = 3.0  # what noticing costs beyond it: quorums, a busy machine
RATE = 16.0  # Mbit/s: the payload takes some two seconds
SIZE = 1_000_000


def order(folder: Path, island: int, islands: int, lighthouse: LighthouseProcess, **more: Any) -> Order:
    return Order(
        folder=str(folder), island=island, islands=islands, settings=lighthouse.settings(), size=SIZE, rate=RATE,
        exchange_timeout_s=EXCHANGE_TIMEOUT_S, **more,
    )  # fmt: skip


def in_the_middle_of_a_bulk(victim: GatewayProcess, after: int = 1) -> int:
    """Wait until the victim has sent a part of its payload in a slot of at least ``after``; which slot."""

    def middle() -> tuple[int, int, int] | None:
        moved = victim.moving()
        return moved if moved and moved[0] >= after and 1 << 20 <= moved[1] < 3 << 20 else None

    return int(until("an exchange under way", middle, 60)[0])


def settled_without(
    others: Sequence[GatewayProcess], victim: GatewayProcess, slot: int, since: float
) -> list[float]:
    """Wait until the others have committed the slot without the victim. Seconds that each took for it since then."""
    took = []
    for other in others:
        event = until(
            f"slot {slot} on island {other.order.island}",
            lambda other=other: next((e for e in other.rounds() if e["round"] == slot), None),
            EXCHANGE_TIMEOUT_S,
        )
        assert victim.order.island not in event["participants"], event
        took.append(event["t"] - since)
    return took


def back_with_the_same_bits(everybody: Sequence[GatewayProcess], since: int) -> None:
    """Wait for two slots, after ``since``, in which all take part; no two islands have committed different bits."""

    def common() -> list[int]:
        full = [
            {
                e["round"]
                for e in g.rounds()
                if len(e["participants"]) == len(everybody) and e["round"] > since
            }
            for g in everybody
        ]
        return sorted(set.intersection(*full))

    until("two slots of all islands", lambda: len(common()) >= 2, 60)
    digests: dict[int, str] = {}
    for event in itertools.chain(*(g.rounds() for g in everybody)):
        assert digests.setdefault(event["round"], event["digest"]) == event["digest"], event


def transfer_s(rate: float = RATE, others: int = 1) -> float:
    return 4 * SIZE * 8 * others / (rate * 1e6)


@pytest.mark.parametrize("islands", [2, 3])
def test_fr_39_a_peer_killed_in_the_middle_of_the_bulk_costs_a_heartbeat_window(
    tmp_path: Path, islands: int
) -> None:
    with LighthouseProcess(tmp_path) as lighthouse:
        orders = [order(tmp_path, i, islands, lighthouse) for i in range(islands)]
        with gateways([GatewayProcess(o) for o in orders]) as all_:
            *others, victim = all_
            slot = in_the_middle_of_a_bulk(victim)
            victim.kill()
            took = settled_without(others, victim, slot, time.time())
            # The survivors exchange among themselves, at their rate.
            allowed = HEARTBEAT_S + SLACK_S + transfer_s(others=islands - 2)
            assert max(took) < allowed, (took, allowed)
            victim.start()
            back_with_the_same_bits(all_, slot)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_fr_39_a_frozen_peer_costs_a_heartbeat_window_sends_nothing_more_and_comes_back(
    tmp_path: Path, frozen: int
) -> None:
    """Island 0 is also the one that serves the store through which gloo's groups meet."""
    with LighthouseProcess(tmp_path) as lighthouse:
        orders = [order(tmp_path, i, 3, lighthouse) for i in range(3)]
        with gateways([GatewayProcess(o) for o in orders]) as all_:
            victim = all_[frozen]
            others = [g for g in all_ if g is not victim]
            slot = in_the_middle_of_a_bulk(victim)
            victim.signal(signal.SIGSTOP)
            began = time.time()
            _, sent, _ = victim.moving() or (slot, 0, 0)
            took = settled_without(others, victim, slot, began)
            assert max(took) < HEARTBEAT_S + SLACK_S + transfer_s(), took
            until("the next slot", lambda: all(g.rounds()[-1]["round"] > slot for g in others), 20)
            victim.signal(signal.SIGCONT)
            back_with_the_same_bits(all_, slot)
            (left,) = [e for e in victim.events("round") if e["round"] == slot]
            assert not left["committed"]
            # What gloo and the kernel held already, and the message that was being paced.
            assert left["bytes_sent"] - sent <= 2 << 20, (left, sent)
            assert len(victim.events("heal")) == 1


@needs_root
def test_fr_39_a_peer_behind_a_cut_link_costs_a_heartbeat_window_and_comes_back(tmp_path: Path) -> None:
    """Of two islands at sites of their own, with the Lighthouse at the first one's; a cut link is silent."""
    with emulated_wan().Wan(sites=2) as wan:
        place = wan.command(0, [])
        with LighthouseProcess(tmp_path, wan.address(0), place) as lighthouse:
            orders = [order(tmp_path, i, 2, lighthouse, advertise=wan.address(i)) for i in range(2)]
            with gateways([GatewayProcess(o, wan.command(o.island, [])) for o in orders]) as all_:
                near, far = all_
                slot = in_the_middle_of_a_bulk(far)
                wan.set(0.0, 0.0, up=False)
                took = settled_without([near], far, slot, time.time())
                assert max(took) < HEARTBEAT_S + SLACK_S, took
                until("the next slot", lambda: near.rounds()[-1]["round"] > slot, 20)
                # Nobody goes on alone who sees no Lighthouse.
                assert max(e["round"] for e in far.rounds()) < slot
                time.sleep(3.0)
                wan.set(0.0, 0.0)
                back_with_the_same_bits(all_, slot)
