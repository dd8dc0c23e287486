"""One run, one seat for each island, one incarnation on it: who has been replaced ends, and harms nothing."""

import pytest

from tests.helpers.cuts import Proxy
from tests.helpers.hub_islands import HubIsland, together
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer


def test_an_incarnation_that_was_replaced_ends_when_it_comes_back(make_hub) -> None:
    hub = make_hub(rules=Rules(lease_s=1.0))
    way = Proxy(hub.port)
    old = HubIsland(0, [f"http://127.0.0.1:{way.port}"])
    other = HubIsland(1, [hub.url])
    together([lambda i=i: (i.join(), i.run(3)) for i in (old, other)], 60)  # type: ignore[misc]
    way.cut(4.0)
    new = HubIsland(0, [hub.url], incarnation="b", started=1.0)
    new.join()
    assert new.state.lineage == other.state.lineage
    old.offer(3)
    together([lambda i=i: i.run(6) for i in (new, other)], 60)  # type: ignore[misc]
    assert new.state.lineage == other.state.lineage
    assert all(outcome.participants == (0, 1) for outcome in other.outcomes)
    with pytest.raises(
        UserError, match="incarnation b of island 0, which is newer than this one, is in the run"
    ):
        old.transport.result(3, 30.0)
    before = new.state.lineage
    together([lambda i=i: i.run(8) for i in (new, other)], 60)  # type: ignore[misc]
    assert new.state.lineage == other.state.lineage != before
    for island in (old, new, other):
        island.transport.leave("done")


def test_two_islands_of_one_number_do_not_share_a_seat(make_hub) -> None:
    hub = make_hub(rules=Rules(lease_s=1.0))
    first = HubIsland(0, [hub.url], islands=1)
    first.join()
    with pytest.raises(UserError, match=r"incarnation a of island 0 is in the run and alive"):
        HubIsland(0, [hub.url], islands=1, incarnation="twin", started=1.0).join()
    first.run(2)
    assert [status for _, status in first.statuses] == ["committed"] * 2
    first.transport.leave("done")


def test_an_island_of_another_run_is_refused(make_hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: HubServer = make_hub()
    monkeypatch.setattr("tests.helpers.hub_islands.RUN", "another-run")
    with pytest.raises(UserError, match="this hub serves run run"):
        HubIsland(0, [hub.url], islands=1).join()
