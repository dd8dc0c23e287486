"""Who founds a run over a real Lighthouse, when islands come one after the other, or not at all."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.integration.exchange.test_gloo_transport import SIZE, Gateway, founded, leave
from torchtitan_diloco.config.own import LighthouseConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.transport import Joined
from torchtitan_diloco.outer.merge import Merged


def with_history(lighthouse: LighthouseConfig, island: int, value: float, slots: int) -> Gateway:
    """As restored from its own disk after so many slots."""
    gateway = Gateway(lighthouse, island, value)
    for slot in range(slots):
        advance = gateway.state.outer_step(0, slot)(Merged.of(torch.zeros(SIZE)))
        gateway.state.commit(
            slot, 0, advance, [island], 100, {f"a/{island}": slot + 1}, {island: {"a": "0-7"}}
        )
    return gateway


def in_order(*joins: tuple[Gateway, int]) -> list[Joined]:
    """Each joins at its step, a while after the one before."""
    with ThreadPoolExecutor(len(joins)) as pool:
        futures = []
        for gateway, step in joins:
            futures.append(pool.submit(gateway.join, len(joins), step=step))
            time.sleep(0.3)
        return [future.result(timeout=30) for future in futures]


@pytest.mark.parametrize("first", ["resumed", "fresh"])
@pytest.mark.parametrize("resumed", [0, 1], ids=["A-is-0", "A-is-1"])
def test_fr_06_a_resumed_island_wins_over_a_fresh_one_whoever_comes_first(
    resumed: int, first: str, lighthouse: LighthouseConfig
) -> None:
    a, b = with_history(lighthouse, resumed, 1.0, slots=3), Gateway(lighthouse, 1 - resumed, 2.0)
    joins = [(a, 500), (b, 0)] if first == "resumed" else [(b, 0), (a, 500)]
    assert [joined.step for joined in in_order(*joins)] == [500, 500]
    for gateway in (a, b):
        assert torch.equal(gateway.state.states[0].anchor, torch.full((SIZE,), 1.0))
    assert a.state.describe() == b.state.describe()
    leave(a, b)


def test_fr_06_of_two_resumed_islands_the_one_that_is_further_wins(lighthouse: LighthouseConfig) -> None:
    a, b = with_history(lighthouse, 0, 5.0, slots=5), with_history(lighthouse, 1, 9.0, slots=9)
    assert [joined.step for joined in in_order((a, 500), (b, 900))] == [900, 900]
    assert torch.equal(a.state.states[0].anchor, torch.full((SIZE,), 9.0))
    assert a.state.describe() == b.state.describe()
    leave(a, b)


@pytest.mark.parametrize("found, islands, present", [("majority", 3, 2), ("any", 2, 1)])
def test_when_patience_is_over_enough_islands_found_the_run_and_a_later_one_joins_it(
    found: str, islands: int, present: int, lighthouse: LighthouseConfig
) -> None:
    impatient = replace(lighthouse, patience_s=1.5)
    here = [Gateway(impatient if i == 0 else lighthouse, i, float(i)) for i in range(present)]
    began = time.monotonic()
    with ThreadPoolExecutor(present) as pool:
        joins = [pool.submit(gateway.join, islands, found=found) for gateway in here]
        waits = None
        while not all(join.done() for join in joins):
            waits = here[0].transport.waiting() or waits
            time.sleep(0.02)
        assert all(join.result().step == 0 for join in joins)
    assert 1.5 <= time.monotonic() - began < 20
    assert waits is not None
    late = Gateway(lighthouse, present, 7.0)
    assert [heal.source for heal in late.join(islands, found=found).heals] == [0]
    for gateway in (*here, late):
        assert torch.equal(gateway.state.states[0].anchor, torch.zeros(SIZE))
        gateway.offer(1.0)
    assert {gateway.settle().participants for gateway in (*here, late)} == {tuple(range(present + 1))}
    leave(*here, late)


def test_when_patience_is_over_a_minority_ends_and_says_how_many_it_takes(
    lighthouse: LighthouseConfig,
) -> None:
    gateway = Gateway(replace(lighthouse, patience_s=1.0), 0)
    words = r"waited 1 s \(lighthouse.patience_s\) for 3 islands, after 1 s \(lighthouse.patience_s\) for 2 of them; "
    with pytest.raises(Resumable, match=words + "islands present: 0"):
        gateway.join(3, found="majority")
    gateway.transport.leave("patience")


def test_a_joiner_is_not_kept_waiting_by_the_rule_of_founding(lighthouse: LighthouseConfig) -> None:
    gateways = founded(lighthouse, 2)
    gateways[1].transport.leave("drain")
    began = time.monotonic()
    again = Gateway(lighthouse, 1)
    again.join(2, found="majority")
    assert time.monotonic() - began < 10
    leave(gateways[0], again)
