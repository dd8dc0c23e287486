"""Over real sockets each joiner heals exactly once, and nobody in steady state: three, four and five islands."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.histories import Learner, network
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig, TransportConfig
from torchtitan_diloco.exchange.gloo import GlooTransport

EVERY, STEPS, PACE_S = 4, 48, 0.05


class Paced(Learner):
    """Whose inner steps take ``PACE_S``."""

    def train(self, until: int) -> None:
        while self.step < until:
            time.sleep(PACE_S)
            super().train(self.step + 1)


@pytest.mark.parametrize("islands", [3, 4, 5])
def test_each_joiner_heals_once_and_nobody_else(
    islands: int, lighthouse: LighthouseConfig, tmp_path: Path
) -> None:
    """All but the last found the run together; it comes later, leaves, and comes back with nothing."""
    config = SemiSyncConfig(sync_every=EVERY, num_islands=islands - 1)

    def learner(island: int, incarnation: str = "first") -> Paced:
        made = Paced(island, tmp_path, network(), config=config, incarnation=incarnation)
        place = replace(lighthouse, patience_s=30.0)
        gloo = lambda merge: GlooTransport(IslandConfig(id=island), place, TransportConfig(), merge)
        made.method.setup.make_transport = gloo
        return made

    late = islands - 1
    founders = [learner(i) for i in range(late)]
    with ThreadPoolExecutor(islands) as pool:
        for joined in [pool.submit(island.join) for island in founders]:
            joined.result(timeout=30)
        training = [pool.submit(partial(island.train, STEPS)) for island in founders]
        while founders[0].outer.slot == 0:  # until then all hold what they began with
            time.sleep(PACE_S)
        joiners = []
        for incarnation in ("first", "second"):
            joiner = learner(late, incarnation)
            joiners.append(joiner)
            pool.submit(joiner.join).result(timeout=30)
            pool.submit(joiner.train, joiner.step + 3 * EVERY).result(timeout=30)
            joiner.method.pause()
            joiner.method.leave("drain")
        for trained in training:
            trained.result(timeout=60)
    assert [len(joiner.events("heal")) for joiner in joiners] == [1, 1]
    assert all(founder.events("heal") == [] for founder in founders)
    for joiner in joiners:
        committed = [e for e in joiner.events("round") if e["committed"]]
        # In the first it may not have made a step yet.
        assert len(committed) >= 2 and all(late in e["participants"] for e in committed[1:])
        healed = joiner.events("heal")[0]
        assert healed["step"] <= committed[0]["step"] - 1, "before its first inner step"
    digests = [
        {e["round"]: e["digest"] for e in island.events("round") if e["committed"]} for island in founders
    ]
    assert all(held == digests[0] for held in digests)
    for founder in founders:
        founder.method.leave("drain")
