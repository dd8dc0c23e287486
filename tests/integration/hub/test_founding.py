"""Who founds a run over a hub that listens, where not everybody comes: by HTTP, and by files."""

from pathlib import Path

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.spool_mirror import Mirror
from tests.integration.hub.test_spool import Quick
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.outer.history import have_parted
from torchtitan_diloco.outer.merge import Merged


def went_on(island: HubIsland, slots: int, tokens: int) -> None:
    """Its state is as restored from its own disk, after so many slots more."""
    state = island.state
    for slot in range(state.slot, state.slot + slots):
        moved = Merged.of(torch.full((state.fragments[0].numel,), 0.125))
        state.commit(
            slot, 0, state.outer_step(0, slot)(moved), [island.island], tokens, {}, {island.island: {}}
        )


@pytest.mark.parametrize("found, islands, present", [("majority", 3, 2), ("any", 3, 1)])
def test_when_patience_is_over_enough_islands_found_the_run_and_a_later_one_joins_it(
    found: str, islands: int, present: int, make_hub
) -> None:
    hub = make_hub()
    here = [HubIsland(i, [hub.url], islands, found=found, patience_s=1.0) for i in range(present)]
    together([island.join for island in here], 30)  # type: ignore[misc]
    late = HubIsland(present, [hub.url], islands, found=found)
    late.join()
    together([lambda i=i: i.run(2) for i in (*here, late)], 30)  # type: ignore[misc]
    assert len({island.state.lineage for island in (*here, late)}) == 1
    assert late.outcomes[-1].participants == tuple(range(present + 1))
    for island in (*here, late):
        island.transport.leave("done")


@pytest.mark.parametrize("found", ["wait_all", "majority"])
def test_too_few_of_them_end_when_patience_is_over_and_say_who_is_there(found: str, make_hub) -> None:
    island = HubIsland(0, [make_hub().url], 3, found=found, patience_s=1.0)
    with pytest.raises(
        Resumable, match=r"waited 1 s \(lighthouse.patience_s\) for 3 islands; islands present: 0"
    ):
        island.join()
    island.transport.leave("failure")


def test_an_island_behind_a_spool_founds_the_run_alone_where_it_may(tmp_path: Path) -> None:
    folders = tmp_path / "hub", tmp_path / "site"
    hub = HubServer(
        "127.0.0.1", 0, RUN, Rules(lease_s=3), tmp_path / "state", spools=[folders[0]], spool_timeout_s=3600.0
    )
    thread = hub.in_thread()
    island = HubIsland(
        0, [], 2, found="any", patience_s=3.0, transport_class=Quick,
        transport_config=TransportConfig(kind="spool", dir=str(folders[1])),
    )  # fmt: skip
    with Mirror(*folders):
        together([lambda: (island.join(), island.run(2))], 60)  # type: ignore[list-item]
        island.transport.leave("done")
    assert [outcome.participants for outcome in island.outcomes] == [(0,), (0,)]
    hub.stop()
    thread.join()


def test_a_newcomer_with_more_committed_tokens_brings_them_and_who_runs_takes_them(make_hub) -> None:
    """As when the hub's disk was set back, and the run has begun again from there."""
    hub = make_hub()
    a = HubIsland(0, [hub.url], 1)
    a.join()
    a.run(2)
    alone = a.state.describe()
    b = HubIsland(1, [hub.url], 1)
    went_on(b, 5, 100_000)
    longer = b.state.describe()
    b.join()
    assert b.heals == 0 and b.state.describe()["fragments"] == longer["fragments"]
    together([lambda i=i: i.run(8) for i in (a, b)], 60)  # type: ignore[misc]
    assert a.state.lineage == b.state.lineage
    assert have_parted(alone, a.state.describe()) and not have_parted(longer, a.state.describe())
    assert a.heals >= 1 and b.heals == 0
    assert a.outcomes[-1].participants == (0, 1)
    for island in (a, b):
        island.transport.leave("done")
