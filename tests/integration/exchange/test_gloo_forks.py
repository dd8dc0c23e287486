"""Two histories of one run over real Lighthouses: islands that cannot see one another, and that meet again."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.histories import Learner, go_on, network
from tests.integration.exchange.conftest import serve
from tests.integration.exchange.test_gloo_founding import with_history
from tests.integration.exchange.test_gloo_transport import Gateway, leave, together
from torchtitan_diloco.checkpoint.manager import read_outer
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig, TransportConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.outer.history import have_parted
from torchtitan_diloco.outer.state import OuterState


@pytest.fixture
def another_lighthouse() -> Iterator[LighthouseConfig]:
    yield from serve(1.0, 0.3)


def alone(gateway: Gateway, slots: int, steps: int = 4) -> OuterState:
    """Commit so many slots by itself; what it then holds."""
    for _ in range(slots):
        gateway.offer(1.0, steps=steps)
        assert gateway.settle().participants == (gateway.island,)
    return gateway.state.copy()


def test_fr_37_islands_that_ask_two_lighthouses_both_end_and_say_who_is_there(
    lighthouse: LighthouseConfig, another_lighthouse: LighthouseConfig
) -> None:
    """Neither founds a run of its own: the number of islands is the run's, and each sees one."""
    places = [replace(place, patience_s=1.5) for place in (lighthouse, another_lighthouse)]
    gateways = [Gateway(place, island) for island, place in enumerate(places)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(gateway.join, 2) for gateway in gateways]
        for island, future in enumerate(futures):
            with pytest.raises(Resumable, match=rf"for 2 islands; islands present: {island}$"):
                future.result(timeout=20)
    leave(*gateways)


@pytest.mark.parametrize("steps", [(4, 6), (6, 4)], ids=["newcomer-has-more", "run-has-more"])
def test_fr_37_when_islands_meet_that_have_gone_on_apart_all_take_the_history_with_more_tokens(
    steps: tuple[int, int], lighthouse: LighthouseConfig, another_lighthouse: LighthouseConfig
) -> None:
    """The run goes on at one Lighthouse; the other island, which has committed three slots elsewhere, comes to it."""
    a, b = (with_history(place, i, 1.0, 0) for i, place in enumerate((lighthouse, another_lighthouse)))
    a.join(1)
    b.join(1)
    here, there = alone(a, 3, steps[0]), alone(b, 3, steps[1])
    leave(b)
    newcomer = Gateway(lighthouse, 1)
    newcomer.state = there.copy()
    joined = newcomer.join(1)
    more = there if steps[1] > steps[0] else here
    if more is there:
        assert joined.heals == ()
        assert newcomer.state.describe()["fragments"] == there.describe()["fragments"]
        newcomer.offer(1.0)
        a.offer(1.0)
        behind, committed = together(a.settle, newcomer.settle)
        assert isinstance(behind, Outcome) and isinstance(committed, Outcome)
        assert (behind.status, committed.participants) == ("behind", (1,))
        deadline = time.monotonic() + 20
        while a.state.slot < newcomer.state.slot:
            assert a.transport.heal(a.state).heals or time.monotonic() < deadline
        assert have_parted(here.describe(), a.state.describe())
    else:
        assert [heal.source for heal in joined.heals] == [0]
        assert have_parted(there.describe(), newcomer.state.describe())
    assert not have_parted(more.describe(), a.state.describe())
    assert a.state.describe() == newcomer.state.describe()
    assert torch.equal(a.state.states[0].anchor, newcomer.state.states[0].anchor)
    for gateway in (a, newcomer):
        gateway.offer(1.0)
    assert {o.participants for o in (a.settle(), newcomer.settle())} == {(0, 1)}
    leave(a, newcomer)


@pytest.mark.parametrize("tokens, loser", [(1000, 0), (1, 1)], ids=["newcomer-has-more", "run-has-more"])
def test_over_real_sockets_the_loser_keeps_its_history_and_names_it(
    tokens: int, loser: int, lighthouse: LighthouseConfig, tmp_path: Path
) -> None:
    """Island 0 founds the run alone and trains on; island 1 comes with a history of its own."""
    config = SemiSyncConfig(sync_every=1, num_islands=2, found="any")
    impatient = replace(lighthouse, patience_s=1.0)

    def learner(island: int, place: LighthouseConfig) -> Learner:
        made = Learner(island, tmp_path, network(), config=config, value=float(island))
        gloo = lambda merge: GlooTransport(IslandConfig(id=island), place, TransportConfig(), merge)
        made.method.setup.make_transport = gloo
        return made

    a = learner(0, impatient)
    a.join()
    a.train(3)
    b = learner(1, lighthouse)
    state = b.fresh()
    go_on(state, 4, tokens, islands=(1,))
    b.restore(state)
    lost = [a.outer.copy(), state]
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(b.join)
        joining.result(timeout=30)
        ends = [pool.submit(island.train, 12) for island in (a, b)]
        for end in ends:
            end.result(timeout=60)
    assert a.outer.describe() == b.outer.describe()
    assert a.events("round")[-1]["participants"] == [0, 1]
    keeper, winner = (a, b)[loser], (a, b)[1 - loser]
    (folder,) = keeper.forks()
    saved = read_outer(folder)
    assert saved is not None and saved[0]["outer"] == lost[loser].describe()
    (event,) = keeper.events("error")
    assert event["kind"] == "fork" and str(folder) in event["message"]
    assert winner.forks() == winner.events("error") == []
    for island in (a, b):
        island.method.leave("drain")
