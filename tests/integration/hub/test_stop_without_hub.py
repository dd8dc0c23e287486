"""An island that is told to stop while its hub is away saves within seconds, and what it has sent never counts twice."""

import threading
import time
from copy import deepcopy
from pathlib import Path

import pytest

from tests.helpers.hub_islands import HubIsland, together
from tests.helpers.hub_proxy import HubProxy, Request
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.exchange import doubt
from torchtitan_diloco.exchange.hub import HubTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.spool import SpoolTransport

SLOTS = 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in (HubTransport, SpoolTransport):
        monkeypatch.setattr(transport, "withdraw_s", 1.0)
    monkeypatch.setattr(doubt, "GOODBYE_S", 0.5)


def drain(island: HubIsland, slots: list[int]) -> list[str]:
    """As the method does it: what is under way is settled, then the island leaves."""
    began, statuses = time.monotonic(), []
    island.transport.withdraw()
    for slot in slots:
        outcome: Outcome | None = None
        while outcome is None:
            outcome = island.transport.result(slot, 0.2)
        statuses.append(outcome.status)
        island.wire.settle(outcome.slot % len(island.sizes), slot, False, False)
    assert time.monotonic() - began < 5.0
    island.transport.leave("drain")
    assert time.monotonic() - began < 6.0
    return statuses


def came_back(island: HubIsland, url: str) -> HubIsland:
    """The island's next start, from the state that it has saved."""
    other = HubIsland(island.island, [url], island.islands, island.sizes, incarnation="b", started=1.0)
    other.state = deepcopy(island.state)
    together([other.join, lambda: None], 30.0)
    return other


def test_what_is_under_way_when_the_hub_is_gone_is_exchanged_after_the_next_start(
    make_hub, tmp_path: Path
) -> None:
    hub = make_hub(folder=tmp_path)
    island = HubIsland(0, [hub.url], islands=1, sizes=(1000, 300))
    island.join()
    island.run(2)
    hub.stop()
    time.sleep(1.0)
    island.offer(2)
    island.offer(3)
    assert drain(island, [2, 3]) == ["withdrawn", "withdrawn"]
    again = make_hub(folder=tmp_path)
    back = came_back(island, again.url)
    back.run(SLOTS)
    assert [status for _, status in back.statuses] == ["committed", "committed"]
    assert back.state.tokens_total == SLOTS * 40
    back.transport.leave("done")


def test_what_the_hub_has_counted_without_the_island_s_knowing_counts_once(make_hub) -> None:
    hub = make_hub()
    sent = threading.Event()

    def decide(request: Request) -> str:
        """No answer comes back any more from the payload of slot 1 on."""
        if request.path.startswith("/slots/1/payload"):
            sent.set()
        return "drop after" if sent.is_set() else ""

    with HubProxy(hub.port, decide).running() as proxy:
        island = HubIsland(0, [proxy.url], islands=1)
        island.join()
        island.run(1)
        island.offer(1)
        deadline = time.monotonic() + 20
        while hub._hub.state.slot < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert hub._hub.state.slot == 2
        assert drain(island, [1]) == ["withdrawn"]
    assert island.state.slot == 1
    back = came_back(island, hub.url)
    assert back.state.slot == 2 and back.heals > 0  # taken in place of what it had sent
    back.run(SLOTS)
    assert [status for _, status in back.statuses] == ["committed"] * 2
    assert hub._hub.state.tokens_total == SLOTS * 40
    back.transport.leave("done")


def test_an_island_behind_a_spool_does_not_wait_for_a_mirror_that_is_away(make_hub, tmp_path: Path) -> None:
    make_hub(spools=[tmp_path])
    place = TransportConfig(kind="spool", dir=str(tmp_path))
    island = HubIsland(0, [], islands=2, transport_config=place, transport_class=SpoolTransport)
    other = HubIsland(1, [], islands=2, transport_config=place, transport_class=SpoolTransport)
    together([island.join, other.join], 60.0)
    island.offer(0)
    # The other has said nothing, so the hub has no outcome; it does not read what comes from here on.
    moved = tmp_path.rename(tmp_path.with_name("away"))
    assert drain(island, [0]) == ["withdrawn"]
    moved.rename(tmp_path)
    other.transport.leave("done")
