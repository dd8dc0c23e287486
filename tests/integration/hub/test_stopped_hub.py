"""A hub that is asked to end: with syncer.save_every above 1 it saves its last versions before it does."""

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.hub_islands import HubIsland, together
from tests.helpers.hub_process import HubProcess

SIZES, SLOTS = (1000, 300), 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hub_that_is_stopped_in_good_order_holds_everything_when_it_comes_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    hub = HubProcess(tmp_path, save_every=100, heartbeat_timeout_s=30.0)
    hub.start()
    islands = [HubIsland(i, [hub.url], 2, SIZES) for i in range(2)]
    try:
        together([lambda i=i: (i.join(), i.run(SLOTS)) for i in islands], 60)  # type: ignore[misc]
        manifest = next(tmp_path.rglob("state.json"))
        assert json.loads(manifest.read_bytes())["state"]["slot"] < SLOTS
        assert hub.terminate(number=number) == 0
        saved = json.loads(manifest.read_bytes())
        assert saved["state"] == islands[0].state.describe()
        hub.start()
        # One that has nothing, and comes alone, takes all of it: nobody else has to bring anything.
        joiner = HubIsland(2, [hub.url], 2, SIZES)
        together([joiner.join], 60)
        assert joiner.state.describe() == islands[0].state.describe()
        for island in (joiner, *islands):
            island.transport.leave("done")
    finally:
        hub.kill()
