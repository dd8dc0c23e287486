"""FR-66: an island that waits says for whom, since when and why. Over the in-memory network."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers import event_schema
from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport
from torchtitan_diloco.semi_sync import waiting


@pytest.mark.parametrize("islands", [2, 3])
def test_fr_66_whoever_waits_names_the_islands_the_slot_and_since_when(
    tmp_path: Path, islands: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "REPORT_S", 0.0)
    caplog.set_level(logging.INFO)
    net = MemoryNet()
    config = SemiSyncConfig(sync_every=1, num_islands=islands)
    methods = []
    for island in range(islands):
        model = nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        methods.append(method_of(model, config, tmp_path, partial(MemoryTransport, net=net), island=island))
        methods[-1].join(0)
    net.run(1.0)
    # Only the first one comes to the slot; the others, which are alive, do so when it has waited for a while.
    for method in methods[1:]:
        method.count(1, 10)
        net.at(7.0, partial(method.send, 0, 1))
    assert methods[0].after_inner_step(1, 10) == 1

    events = [json.loads(line) for line in (tmp_path / "island-0" / "events.jsonl").read_text().splitlines()]
    assert event_schema.problems(events) == []
    waited = [event for event in events if event["event"] == "waiting"]
    assert len(waited) >= 10, "repeated as long as it lasts"
    assert {tuple(event["for"]) for event in waited} == {tuple(range(1, islands))}
    assert {event["why"] for event in waited} == {"headers of slot 0"}
    assert {event["since"] for event in waited} == {1.0}
    others = "island 1" if islands == 2 else "islands 1, 2"
    assert f"for {others}: headers of slot 0" in caplog.text
    (outcome,) = [event for event in events if event["event"] == "round"]
    assert outcome["committed"] and outcome["participants"] == list(range(islands))
