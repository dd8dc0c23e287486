"""Who founds a run, over the in-memory network: islands that come late, or not at all."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.methods import method_of
from tests.unit.semi_sync.test_field_cases import Bare
from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange.memory import MemoryNet, MemoryTransport
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.values import whole
from torchtitan_diloco.semi_sync.diloco import DiLoCo

SIZE = 6


def island(
    number: int, folder: Path, net: MemoryNet, value: float, found: str = "wait_all", islands: int = 2
) -> DiLoCo:
    """Fresh, all its parameters ``value``."""
    config = SemiSyncConfig(sync_every=4, num_islands=islands, found=found)  # type: ignore[arg-type]
    return method_of(
        Bare({"w": torch.full((SIZE,), value)}),
        config,
        folder,
        partial(MemoryTransport, net=net),
        island=number,
    )


def with_history(number: int, folder: Path, net: MemoryNet, value: float, slots: int) -> DiLoCo:
    """As restored from its own disk after so many slots, with parameters that are all ``value``."""
    method = island(number, folder, net, value)
    state = method._found([torch.full((SIZE,), value)])
    for slot in range(slots):
        advance = state.outer_step(0, slot)(Merged.of(torch.zeros(SIZE)))
        state.commit(slot, 0, advance, [number], 100, {}, {number: {}})
    method.outer, method.next_slot = state, slots
    return method


def come(*joins: tuple[float, DiLoCo, int]) -> list[int]:
    """Each joins at its own step, so many seconds after the others; where they go on."""
    with ThreadPoolExecutor(len(joins)) as pool:
        futures = []
        for delay, method, step in joins:
            time.sleep(delay)
            futures.append(pool.submit(method.join, step))
        return [future.result(timeout=20) for future in futures]


def values(method: DiLoCo) -> list[float]:
    """All different values of the island's parameters and its anchor."""
    assert method.outer is not None
    held = [whole(present) for f in method.fragments if (present := method.parameters.present(f)) is not None]
    return torch.cat([*held, *(s.anchor for s in method.outer.states)]).unique().tolist()


@pytest.mark.parametrize("first", ["resumed", "fresh"])
@pytest.mark.parametrize("resumed", [0, 1], ids=["A-is-0", "A-is-1"])
def test_fr_06_a_resumed_island_wins_over_a_fresh_one_whoever_comes_first(
    resumed: int, first: str, tmp_path: Path
) -> None:
    net = MemoryNet(patience_s=10_000.0)
    a = with_history(resumed, tmp_path, net, 1.0, slots=125)
    b = island(1 - resumed, tmp_path, net, 2.0)
    joins = [(0.0, a, 500), (0.02, b, 0)]
    if first == "fresh":
        joins = [(0.0, b, 0), (0.02, a, 500)]
    assert come(*joins) == [500, 500]
    assert values(a) == values(b) == [1.0]
    assert a.outer is not None and b.outer is not None
    assert a.outer.describe() == b.outer.describe()


@pytest.mark.parametrize("further", [0, 1])
def test_fr_06_of_two_resumed_islands_the_one_that_is_further_wins(further: int, tmp_path: Path) -> None:
    """One at step 500 and one at 900, each on its own disk."""
    net = MemoryNet(patience_s=10_000.0)
    b = with_history(further, tmp_path, net, 9.0, slots=225)
    a = with_history(1 - further, tmp_path, net, 5.0, slots=125)
    assert come((0.0, a, 500), (0.02, b, 900)) == [900, 900]
    assert values(a) == values(b) == [9.0]
    assert a.next_slot == b.next_slot == 225


@pytest.mark.parametrize(
    "found, islands, present, founded",
    [
        ("wait_all", 3, 2, False),
        ("majority", 3, 2, True),
        ("majority", 4, 2, False),
        ("any", 3, 1, True),
    ],
)
def test_after_patience_the_rule_decides_whether_who_is_there_founds_the_run(
    found: str, islands: int, present: int, founded: bool, tmp_path: Path
) -> None:
    net = MemoryNet(patience_s=20.0)
    methods = [island(i, tmp_path, net, float(i), found, islands) for i in range(present)]
    ways: list[Callable[[], object]] = [partial(method.join, 0) for method in methods]
    with ThreadPoolExecutor(present) as pool:
        futures = [pool.submit(way) for way in ways]
        if founded:
            assert [future.result(timeout=20) for future in futures] == [0] * present
            assert net.now >= 20.0
            assert all(values(method) == [0.0] for method in methods)
        else:
            for future in futures:
                with pytest.raises(
                    Resumable, match=rf"waited 20 s \(lighthouse.patience_s\) for {islands} islands"
                ):
                    future.result(timeout=20)
            assert not net.nodes


def test_founding_from_equal_weights_is_no_heal(tmp_path: Path) -> None:
    net = MemoryNet(patience_s=10_000.0)
    methods = [island(i, tmp_path, net, 3.0) for i in range(2)]
    come(*((0.0, method, 0) for method in methods))
    for number in range(2):
        assert '"heal"' not in (tmp_path / f"island-{number}" / "events.jsonl").read_text()
