"""Several addresses of one hub: the next is tried when one fails."""

import socket

import pytest

from tests.helpers.cuts import Proxy
from tests.helpers.hub_islands import HubIsland, together
from tests.helpers.site_proxies import PlainProxy


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


@pytest.mark.parametrize("first", ["closed", "no hub", "no such name"])
def test_an_address_where_no_hub_answers_is_passed_over(make_hub, first: str) -> None:
    hub = make_hub()
    web = PlainProxy({}, ())  # answers 405 to everything
    urls = {
        "closed": f"http://127.0.0.1:{closed_port()}",
        "no hub": web.url,
        "no such name": "http://no-such-host.invalid:80",
    }
    islands = [HubIsland(i, [urls[first], hub.url]) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(4), i.transport.leave("done")) for i in islands], 60)  # type: ignore[misc]
    assert [status for _, status in islands[0].statuses] == ["committed"] * 4
    assert islands[0].state.lineage == islands[1].state.lineage
    web.close()


@pytest.mark.parametrize("down", [0, 1])
def test_training_goes_on_when_the_address_in_use_is_lost(make_hub, down: int) -> None:
    hub = make_hub()
    ways = [Proxy(hub.port), Proxy(hub.port)]
    urls = [f"http://127.0.0.1:{way.port}" for way in ways]
    # Two connections for bulk that fail at once must not take the island back to the address it came from.
    islands = [HubIsland(i, urls if down == 0 else urls[::-1], sizes=(3_000_000,)) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(2)) for i in islands], 60)  # type: ignore[misc]
    for slot in range(2, 6):
        for island in islands:
            island.offer(slot)
        if slot == 3:
            ways[down].cut(600.0)
        together([lambda i=i, s=slot: i.settle(s, 30.0) for i in islands], 60)  # type: ignore[misc]
    assert all(status == "committed" for island in islands for _, status in island.statuses)
    assert islands[0].state.lineage == islands[1].state.lineage
    for island in islands:
        island.transport.leave("done")
