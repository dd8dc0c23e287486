"""One island in a network namespace, in a process of its own, which reads the interface's counters around every slot.

Run as: python -m tests.helpers.counted_island ISLAND LIGHTHOUSE FOLDER SIZE SLOTS WIRE...

Its model is one parameter of SIZE values, which a step moves at random. For each codec (WIRE) there is a run of its own, of
SLOTS slots. Writes FOLDER/counted-<wire>-<island>.json: for each slot a dict with the ``round`` event's figures, what the
interface ``sent`` and ``received`` meanwhile (bytes), and the control ``messages`` that came and went.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import (
    CodecConfig,
    IslandConfig,
    LighthouseConfig,
    SemiSyncConfig,
    TransportConfig,
)
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.observe.reading import EventTail

DEVICE = "wan0"


def counters() -> tuple[int, int]:
    """Bytes (sent, received) by the interface so far. /sys would show that of the namespace it was mounted in."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == DEVICE:
            words = figures.split()
            return int(words[8]), int(words[0])
    raise RuntimeError(f"there is no {DEVICE}")


class CountedTransport(GlooTransport):
    """Counts the control messages of both directions."""

    messages = 0

    def join(self, *arguments: Any) -> Any:
        joined = super().join(*arguments)
        send, deliver = self._outbox.send, self._server._deliver  # type: ignore[union-attr]

        def sending(*words: Any) -> None:
            self.messages += 1
            send(*words)

        def delivered(*words: Any) -> None:
            self.messages += 1
            deliver(*words)

        self._outbox.send = sending  # type: ignore[method-assign]
        self._server._deliver = delivered  # type: ignore[union-attr]
        return joined


def run(island: int, lighthouse: str, folder: Path, size: int, slots: int, wire: str) -> list[dict[str, Any]]:
    """One run with this codec."""
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(size)))
    config = SemiSyncConfig(sync_every=1, num_islands=2, codec=CodecConfig(wire=wire))
    make = partial(
        CountedTransport,
        IslandConfig(id=island),
        LighthouseConfig(address=lighthouse, patience_s=60.0),
        TransportConfig(exchange_timeout_s=60.0),
    )
    method = method_of(
        model,
        config,
        folder / wire,
        make,
        island=island,
        steps=slots,
        incarnation=f"start-{wire}",
        run_id=wire,
    )
    assert method.join(0) == 0
    transport = method.transport
    assert isinstance(transport, CountedTransport)
    generator = torch.Generator().manual_seed(island)
    measured = []
    for step in range(1, slots + 1):
        with torch.no_grad():
            model.w.add_(torch.randn(size, generator=generator), alpha=0.01)
        before, messages = counters(), transport.messages
        assert method.after_inner_step(step, 10) == step
        after = counters()
        measured.append(
            {
                "sent": after[0] - before[0],
                "received": after[1] - before[1],
                "messages": transport.messages - messages,
            }
        )
    method.leave("drain")
    events = EventTail(folder / wire / f"island-{island}" / "events.jsonl").read()
    rounds = [event for event in events if event["event"] == "round"]
    return [{**event, **counted} for event, counted in zip(rounds, measured, strict=True)]


def main() -> None:
    island, lighthouse, folder, size, slots = sys.argv[1:6]
    for wire in sys.argv[6:]:
        measured = run(int(island), lighthouse, Path(folder), int(size), int(slots), wire)
        Path(folder, f"counted-{wire}-{island}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
