"""The hub's process is killed without warning, again and again; the run ends as if it had not been."""

import threading
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_process import HubProcess
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer

ISLANDS, SIZES = 3, (1000, 300)


class Witness(HubIsland):
    """Remembers every anchor that it has held."""

    def settle(self, slot: int, seconds: float = 240.0) -> Outcome:
        outcome = super().settle(slot, seconds)
        for fragment, held in enumerate(self.state.states):
            seen[fragment, held.version].add(f"{held.digest} {held.lineage}")
        return outcome


seen: defaultdict[tuple[int, int], set[str]] = defaultdict(set)


def run_all(url: str, slots: int) -> list[Witness]:
    islands = [Witness(i, [url], ISLANDS, SIZES, patience_s=240.0) for i in range(ISLANDS)]

    def whole_run(island: Witness) -> None:
        island.join()
        island.run(slots)

    together([lambda island=island: whole_run(island) for island in islands], 500)
    return islands


def undisturbed(slots: int) -> HubIsland:
    server = HubServer("127.0.0.1", 0, RUN, Rules())
    thread = server.in_thread()
    try:
        islands = run_all(server.url, slots)
        for island in islands:
            island.transport.leave("done")
        return islands[0]
    finally:
        server.stop()
        thread.join(10)


def check_kills(folder: Path, times: int, slots: int, save_every: int, seed: int) -> None:
    seen.clear()
    reference = undisturbed(slots)
    random = Random(seed)
    print(f"seed {seed}")
    hub = HubProcess(folder, save_every=save_every, heartbeat_timeout_s=30.0)
    hub.start()
    islands = [Witness(i, [hub.url], ISLANDS, SIZES, patience_s=240.0) for i in range(ISLANDS)]
    transports = [island.transport for island in islands]
    down: list[float] = []

    def whole_run(island: Witness) -> None:
        island.join()
        island.run(slots)

    def kill() -> None:
        for number in range(times):
            target = (number + 1) * slots // (times + 1)
            while max(island.state.slot for island in islands) < target:
                time.sleep(0.002)
            time.sleep(random.uniform(0.0, 0.15))
            hub.kill()
            began = time.monotonic()
            # Each island says for whom it waits, and why.
            while not all((w := t.waiting()) and hub.url in w.target and w.why for t in transports):
                assert time.monotonic() < began + 20, [t.waiting() for t in transports]
                time.sleep(0.01)
            hub.start()
            down.append(time.monotonic() - began)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        together([lambda island=island: whole_run(island) for island in islands], 500)
        killer.join(30)
        assert len(down) == times
        for island in islands:
            island.transport.leave("done")
    finally:
        hub.kill()
    print(f"down {sum(down):.0f} s; healed:", [island.heals for island in islands])
    # One version, one anchor and one history, whoever has held it and when.
    assert {key: len(digests) for key, digests in seen.items() if len(digests) > 1} == {}
    for island in islands:
        assert island.state.describe() == reference.state.describe()
        for name, tensor in island.state.tensors().items():
            assert torch.equal(tensor, reference.state.tensors()[name])


@pytest.mark.parametrize("save_every", [1, 5])
def test_a_hub_that_is_killed_three_times(tmp_path: Path, save_every: int) -> None:
    check_kills(tmp_path, times=3, slots=24, save_every=save_every, seed=10 + save_every)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("save_every", [1, 5])
def test_a_hub_that_is_killed_twenty_times(tmp_path: Path, save_every: int) -> None:
    check_kills(tmp_path, times=20, slots=100, save_every=save_every, seed=20 + save_every)
