"""An island behind a spool beside two over HTTP: how many of its contributions are merged, and what the others wait.

    python benchmarks/spool.py                                    # some 8 minutes
    python benchmarks/spool.py --slots 4 --latency 2 --step 0.3   # half a minute

The islands do nothing but exchange with a real hub, by the production transports; inner steps are slept. The mirror is one
of this program's own, which brings every file, and every deletion, to the other side so many seconds after it has come. A
slot is sent every H steps and applied tau steps later, as with [semi_sync] sync_every and overlap. Stall: the time that an
island waits at that point, as a share of the time from its first slot on.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from paired import machine

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.spool_mirror import Mirror, files
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.exchange.spool import SpoolTransport
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer


class LateMirror(Mirror):
    """Whatever comes or goes on one side does so on the other ``latency`` seconds later."""

    def __init__(self, hub: Path, island: Path, latency: float) -> None:
        super().__init__(hub, island, seconds=0.1)
        self._latency = latency
        self._changed: dict[tuple[Path, str, bool], float] = {}

    def copy(self, source: Path, target: Path) -> None:
        there, here, now = files(source), files(target), time.monotonic()
        differing = {(source, name, True) for name in there - here} | {
            (source, name, False) for name in here - there
        }
        self._changed = {key: at for key, at in self._changed.items() if key[0] != source or key in differing}
        for key in differing:
            if now - self._changed.setdefault(key, now) < self._latency:
                continue
            _, name, new = key
            path = target / name
            if not new:
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.copy")
            with contextlib.suppress(FileNotFoundError):
                temporary.write_bytes((source / name).read_bytes())
                temporary.replace(path)


def train(island: HubIsland, slots: int, every: int, tau: int, step_s: float) -> float:
    """Returns the share of the time that the island waited for outcomes."""
    island.join()
    began, stall, step, open_slot, due = time.monotonic(), 0.0, 0, -1, -1
    while island.state.slot < slots:
        if step % every == 0:
            open_slot, due = island.state.slot, step + tau
            island.offer(open_slot, every)
        time.sleep(step_s)
        step += 1
        if step == due:
            waited = time.monotonic()
            island.settle(open_slot, 3600.0)
            stall += time.monotonic() - waited
    return stall / (time.monotonic() - began)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--latency", type=float, default=10.0, help="seconds, each way")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of an inner step")
    parser.add_argument("--every", type=int, default=40, help="H")
    parser.add_argument("--tau", type=int, default=32)
    parser.add_argument("--values", type=int, default=1_000_000, help="parameters")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    sizes = (options.values,)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = HubServer("127.0.0.1", 0, RUN, Rules(), folder / "state", spools=[folder / "hub"])
        thread = server.in_thread()
        islands = [HubIsland(i, [server.url], sizes=sizes, islands=3, patience_s=3600.0) for i in range(2)]
        config = TransportConfig(kind="spool", dir=str(folder / "site"))
        islands.append(
            HubIsland(
                2, [], sizes=sizes, islands=3, patience_s=3600.0, transport_config=config,
                transport_class=SpoolTransport,
            )
        )  # fmt: skip
        stalls = [0.0, 0.0, 0.0]
        lock = threading.Lock()

        def run(island: HubIsland) -> None:
            share = train(island, options.slots, options.every, options.tau, options.step)
            with lock:
                stalls[island.island] = share

        cpu, began = time.process_time(), time.monotonic()
        with LateMirror(folder / "hub", folder / "site", options.latency):
            together([lambda island=island: run(island) for island in islands], 1e6)
            for island in islands:
                island.transport.leave("done")
        used = (time.process_time() - cpu) / (time.monotonic() - began)
        server.stop()
        thread.join()
    outcomes = {o.slot: o for o in islands[0].outcomes if o.status == "committed"}
    merged = sum(2 in outcome.participants for outcome in outcomes.values())
    result = {
        "slots": options.slots,
        "latency_s": options.latency,
        "step_s": options.step,
        "sync_every": options.every,
        "overlap": options.tau,
        "values": options.values,
        "merged_share": merged / options.slots,
        "http_stall_share": max(stalls[:2]),
        "spool_stall_share": stalls[2],
        "spool_exchange_s": statistics.median(o.exchange_s for o in islands[2].outcomes),
        "same_anchors": len({island.state.lineage for island in islands}) == 1,
        "cores_used": used,
        "machine": machine(),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
