"""FR-38: the Lighthouse dies, and is started again on the same address, or never."""

import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gateway_process import GatewayProcess, Order, gateways, until
from tests.helpers.lighthouse_process import HEARTBEAT_S, LighthouseProcess

AWAY_S = 5.0
GAP_S = 1.5  # between two inner steps of an island that exchanges; what a busy machine may cost


def order(folder: Path, island: int, settings: dict[str, Any], **more: Any) -> Order:
    return Order(folder=str(folder), island=island, islands=2, settings=settings, sync_every=4, **more)


def slots(everybody: Sequence[GatewayProcess], count: int) -> None:
    """Wait until each has committed so many more."""
    before = [len(g.rounds()) for g in everybody]
    until(
        f"{count} more slots",
        lambda: all(len(g.rounds()) >= b + count for g, b in zip(everybody, before, strict=True)),
        30,
    )


def gap(gateway: GatewayProcess, since: float, to: float) -> float:
    """The longest time between two inner steps."""
    times = [since, *(e["t"] for e in gateway.events("inner") if since <= e["t"] <= to), to]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def check_one_history(everybody: Sequence[GatewayProcess], alone: int = 0) -> None:
    """Every slot has the same bits wherever it was committed, by both islands but for ``alone``; none comes twice."""
    digests: dict[int, str] = {}
    for gateway in everybody:
        rounds = gateway.rounds()
        for key in ("round", "version"):
            assert all(later[key] > earlier[key] for earlier, later in itertools.pairwise(rounds))
        assert sum(e["participants"] != [0, 1] for e in rounds) <= alone
        for event in rounds:
            assert digests.setdefault(event["round"], event["digest"]) == event["digest"]


def test_fr_38_a_lighthouse_that_is_back_after_five_seconds_costs_no_inner_step_and_splits_nobody(
    tmp_path: Path,
) -> None:
    with LighthouseProcess(tmp_path) as lighthouse:
        settings = lighthouse.settings()
        with gateways([GatewayProcess(order(tmp_path, i, settings)) for i in range(2)]) as both:
            slots(both, 3)
            lighthouse.kill()
            killed = time.time()
            time.sleep(AWAY_S)
            lighthouse.start()
            time.sleep(HEARTBEAT_S + 3.0)  # as long as a view without the other would not be believed
            slots(both, 2)
            for gateway in both:
                assert gap(gateway, killed, time.time()) < GAP_S
            check_one_history(both)
            # It does again what it is there for.
            both[1].kill()
            slots(both[:1], 2)
            both[1].start()
            until("the other is back", lambda: both[0].rounds()[-1]["participants"] == [0, 1], 40)
            slots(both, 2)


def test_fr_38_a_lighthouse_killed_in_the_middle_of_a_quorum_splits_nobody(tmp_path: Path) -> None:
    with LighthouseProcess(tmp_path) as lighthouse:
        settings = lighthouse.settings()
        with gateways([GatewayProcess(order(tmp_path, i, settings)) for i in range(2)]) as both:
            slots(both, 2)
            # Its heartbeats count for a while, so the other's request stays open.
            both[1].signal(signal.SIGSTOP)
            time.sleep(0.5)
            lighthouse.kill()
            both[1].signal(signal.SIGCONT)
            killed = time.time()
            time.sleep(AWAY_S)
            lighthouse.start()
            time.sleep(HEARTBEAT_S + 3.0)
            slots(both, 2)
            assert max(gap(gateway, killed, time.time()) for gateway in both) < GAP_S
            check_one_history(both)


def test_fr_38_an_island_frozen_while_the_lighthouse_comes_back_is_gone_without_and_joins_again(
    tmp_path: Path,
) -> None:
    with LighthouseProcess(tmp_path) as lighthouse:
        settings = lighthouse.settings()
        with gateways([GatewayProcess(order(tmp_path, i, settings)) for i in range(2)]) as both:
            slots(both, 2)
            both[1].signal(signal.SIGSTOP)
            lighthouse.kill()
            time.sleep(1.0)
            lighthouse.start()
            slots(both[:1], 2)
            both[1].signal(signal.SIGCONT)
            until("the other is back", lambda: both[0].rounds()[-1]["participants"] == [0, 1], 40)
            slots(both, 2)
            check_one_history(both, alone=1000)


@pytest.mark.parametrize("peer_dies", [False, True], ids=["both live", "and the peer dies"])
def test_fr_38_without_a_lighthouse_islands_end_after_their_patience_resumable_and_go_on_later(
    tmp_path: Path, peer_dies: bool
) -> None:
    patience_s = 6.0
    with LighthouseProcess(tmp_path) as lighthouse:
        settings = lighthouse.settings(patience_s)
        with gateways([GatewayProcess(order(tmp_path, i, settings)) for i in range(2)]) as both:
            slots(both, 2)
            lighthouse.kill()
            killed = time.time()
            if peer_dies:
                both[1].kill()
            ended = both[: 1 if peer_dies else 2]
            for gateway in ended:
                assert gateway.ended(patience_s + 20) == 0
                state = gateway.state()
                assert state["state"] == "resume"
                assert f"lighthouse.address = {lighthouse.address}" in state["reason"], state
                assert "lighthouse.patience_s" in state["reason"]
                assert patience_s - 1.0 < state["t"] - killed < patience_s + 15.0
            versions = [max(e["version"] for e in g.rounds()) for g in ended]
            steps = [g.state()["step"] for g in ended]
            lighthouse.start()
            for gateway in both:
                if gateway.process is None or gateway.process.poll() is not None:
                    gateway.start()
            slots(both, 2)
            # The one that died has not saved, heals, and may have nothing to give to the first slot.
            check_one_history(both, alone=int(peer_dies))
            for gateway, version, step in zip(ended, versions, steps, strict=True):
                assert gateway.rounds()[-2]["version"] > version
                assert gateway.events("inner")[-1]["step"] >= step - 1
