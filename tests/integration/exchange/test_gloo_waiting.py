"""FR-66, FR-57, FR-07: islands that are slow, or whose links are, are waited for, and it can be seen why."""

import re
import time
from pathlib import Path

from tests.helpers import event_schema
from tests.helpers.gateway_process import GatewayProcess, Order, gateways, until
from tests.helpers.lighthouse_process import HEARTBEAT_S, LighthouseProcess

EXCHANGE_TIMEOUT_S = 2.0
PACE_S, SYNC_EVERY = 0.15, 10
FAST_WINDOW_S = PACE_S * SYNC_EVERY


def test_fr_57_and_fr_07_an_island_five_times_slower_meets_no_time_out_and_the_wait_is_counted_and_explained(
    tmp_path: Path,
) -> None:
    """The fast one arrives longer before the slow one than any time-out lasts."""
    wait_s = 4 * FAST_WINDOW_S
    assert wait_s > EXCHANGE_TIMEOUT_S + 1.0 and wait_s > HEARTBEAT_S + 1.0
    with LighthouseProcess(tmp_path) as lighthouse:
        orders = [
            Order(
                folder=str(tmp_path), island=i, islands=2, settings=lighthouse.settings(), pace_s=pace_s,
                sync_every=SYNC_EVERY, exchange_timeout_s=EXCHANGE_TIMEOUT_S,
            )
            for i, pace_s in enumerate((PACE_S, 5 * PACE_S))
        ]  # fmt: skip
        with gateways([GatewayProcess(o) for o in orders]) as both:
            until("three slots", lambda: all(len(g.rounds()) >= 3 for g in both), 90)
            fast, slow = both
            for gateway in both:
                assert all(e["committed"] and e["participants"] == [0, 1] for e in gateway.events("round"))
                assert all(len(set(e["weights"])) == 1 for e in gateway.rounds()), "as many steps and tokens"
                assert len(gateway.events("join")) == 1
                assert event_schema.problems(gateway.events()) == []
            for event in fast.rounds()[1:3]:
                assert wait_s - 2.0 < event["stall_s"] < wait_s + 3.0
            assert all(event["stall_s"] < 1.0 for event in slow.rounds()[1:3])
            # Whoever looks sees why, while it lasts.
            waited = [e for e in fast.events("waiting") if e["for"] == [1]]
            assert waited, fast.events("waiting")
            for event in waited:
                if "slot" in event["why"]:
                    assert re.fullmatch(
                        r"headers of slot \d+; island 1 is http://127\.0\.0\.1:\d+", event["why"]
                    )
                    assert 3.0 < event["t"] - event["since"] < wait_s + 3.0
            assert re.search(
                r"waiting since \d+ s for island 1: headers of slot \d+; island 1 is", fast.log.read_text()
            )


def test_fr_66_a_slow_transfer_is_told_with_how_far_it_has_come_and_its_rate(tmp_path: Path) -> None:
    size, rate = 1_250_000, 4.0  # 5 MB at 0.5 MB/s each way
    with LighthouseProcess(tmp_path) as lighthouse:
        orders = [
            Order(
                folder=str(tmp_path), island=i, islands=2, settings=lighthouse.settings(), size=size, rate=rate,
            )
            for i in range(2)
        ]  # fmt: skip
        with gateways([GatewayProcess(o) for o in orders]) as both:
            began = time.time()
            find = lambda: [e for e in both[0].events("waiting") if " MB" in e["why"]]
            event = until("a transfer that is told", find, 40)[0]
            assert event["for"] == [1]
            told = re.fullmatch(
                r"bulk of slot \d+; island 1 is http://127\.0\.0\.1:\d+; (\d+\.\d) of 10\.0 MB at (\d+\.\d\d) MB/s.*",
                event["why"],
            )
            assert told, event
            moved, speed = map(float, told.groups())
            assert 0.0 < moved < 10.0
            assert 0.3 < speed < 1.5
            assert began < event["since"] < event["t"]


def test_fr_66_whoever_waits_for_the_others_to_found_names_them(tmp_path: Path) -> None:
    with LighthouseProcess(tmp_path) as lighthouse:
        order = Order(folder=str(tmp_path), island=1, islands=3, settings=lighthouse.settings())
        with gateways([GatewayProcess(order)]) as (alone,):
            (event, *_) = until("a word on it", lambda: alone.events("waiting"), 40)
            assert event["for"] == [0, 2]
            assert event["why"] == "islands present: 1; for 3 islands"
