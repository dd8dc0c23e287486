"""An island's share of the data while slots come and go."""

from pathlib import Path

import torch

from tests.helpers.schedules import Feed, source
from torchtitan_diloco.data.ledger import Ledger, read_reading
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.semi_sync.share import DataShare


def test_an_island_that_only_missed_failed_slots_goes_on_where_it_was_reading(tmp_path: Path) -> None:
    """Its weights were trained on what it has read: read again, those samples would count twice and be accounted once."""
    fragments = whole_model([TensorSpec("w", (2,), torch.float32)])
    outer = OuterState.found(fragments, OuterSGD(1.0, 0.0, False), [torch.zeros(2)])
    feed, ledger = Feed([source("a", 20, shards=1)], 4, 0), Ledger(tmp_path, 0)
    share = DataShare(feed, ledger, IslandGroup(), 0)
    share.enter(outer, (0,), healed=False)
    feed.next_batch()
    share.stepped(outer)
    before = feed.positions()
    assert list(before.values()) == [4]

    outer.slot = 3  # slots 0 to 2 had failed when it asked where the run stands
    share.enter(outer, (0,), healed=False)
    assert feed.positions() == before
    assert share.header(outer)["positions"] == before
    reading = read_reading(tmp_path / "reading.json")
    assert reading is not None and list(reading["streams"].values()) == [[0, 4]]

    share.enter(outer, (0,), healed=True)  # weights of another island: what it read is not in them
    assert list(feed.positions().values()) == [0]
    ledger.close()
