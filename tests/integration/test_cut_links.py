"""FR-35: the link between two islands is cut in the middle of a slot; both commit the same bits, or neither keeps any."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchft.coordination import LighthouseServer

from tests.golden.compare import rounds
from tests.helpers.cuts import Proxy, cut_gloo
from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import (
    IslandConfig,
    LighthouseConfig,
    MergeConfig,
    SemiSyncConfig,
    TransportConfig,
)
from torchtitan_diloco.exchange import bulk, gloo
from torchtitan_diloco.exchange.attempt import Bulk
from torchtitan_diloco.exchange.control import ControlServer
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterStep
from torchtitan_diloco.semi_sync.diloco import DiLoCo

pytestmark = pytest.mark.slow

SLOT = 2  # the one that is hit
STEPS = 6
SIZE = 100_003
CHUNK = 10_000  # bytes


class ProxiedServer(ControlServer):
    """Advertises a proxy of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.proxy = Proxy(self.port)
        self.url = f"http://127.0.0.1:{self.proxy.port}"


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[LighthouseConfig]:
    monkeypatch.setattr(bulk, "CHUNK", CHUNK)
    monkeypatch.setattr(gloo, "ControlServer", ProxiedServer)
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=300, quorum_tick_ms=20, heartbeat_timeout_ms=5000
    )
    port = server.address().rsplit(":", 1)[1]
    yield LighthouseConfig(
        address=f"http://127.0.0.1:{port}",
        heartbeat_interval_s=0.2,
        quorum_interval_s=0.05,
        patience_s=30.0,
    )
    server.shutdown()


class CutIsland:
    """An island whose parameters grow by a constant each step; keeps what it offered and how its parameters changed."""

    def __init__(self, number: int, overlap: int, lighthouse: LighthouseConfig, folder: Path) -> None:
        self.number, self.folder = number, folder / f"island-{number}"
        self.model = nn.Module()
        for name in ("a", "b"):
            self.model.register_parameter(name, nn.Parameter(torch.zeros(SIZE)))
        transport = TransportConfig(exchange_timeout_s=10.0)
        config = SemiSyncConfig(
            sync_every=2, fragments=2, overlap=overlap, num_islands=2, merge=MergeConfig(weight="steps")
        )
        self.method: DiLoCo = method_of(
            self.model,
            config,
            folder,
            lambda merge: GlooTransport(IslandConfig(id=number), lighthouse, transport, merge),
            island=number,
            steps=STEPS,
            incarnation=f"start-{number}",
        )
        self.headers: dict[int, Header] = {}
        self.bulks: Counter[int] = Counter()  # by slot
        self.values: list[tuple[torch.Tensor, torch.Tensor]] = []  # "a", before and after each exchange

    def join(self) -> None:
        assert self.method.join(0) == 0
        transport = self.transport
        offer = transport.offer

        def noted(header: Header, payload: torch.Tensor, outer_step: OuterStep) -> None:
            self.headers[header.slot] = header
            offer(header, payload, outer_step)

        transport.offer = noted  # type: ignore[method-assign]
        exchange = transport._bulk.exchange

        def counted(me: Any, effect: Bulk, store: str) -> Any:
            self.bulks[effect.attempt[0]] += 1
            return exchange(me, effect, store)

        transport._bulk.exchange = counted  # type: ignore[method-assign]

    @property
    def transport(self) -> GlooTransport:
        assert isinstance(self.method.transport, GlooTransport)
        return self.method.transport

    def ports(self) -> set[int]:
        """Of everything but gloo's own connections."""
        server = self.transport._server
        assert isinstance(server, ProxiedServer)
        store = int(self.transport._bulk.address.rsplit(":", 1)[1])
        lighthouse = int(self.transport._lighthouse.address.rsplit(":", 1)[1])
        return {server.port, server.proxy.port, store, lighthouse}

    @torch.no_grad()
    def train(self) -> None:
        for step in range(1, STEPS + 1):
            for parameter in self.model.parameters():
                parameter.add_(0.1 * (self.number + 1))
            before = self.model.a.detach().clone()
            assert self.method.after_inner_step(step, 10) == step
            self.values.append((before, self.model.a.detach().clone()))


def run(
    lighthouse: LighthouseConfig, folder: Path, overlap: int, fault: Callable[[list[CutIsland]], None]
) -> list[CutIsland]:
    islands = [CutIsland(i, overlap, lighthouse, folder) for i in range(2)]

    def together(call: Callable[[CutIsland], None]) -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(call, island) for island in islands]:
                future.result(timeout=60)

    together(CutIsland.join)
    fault(islands)
    together(CutIsland.train)
    together(lambda island: island.method.leave("done"))
    return islands


def check_same_bits(islands: list[CutIsland]) -> list[list[dict[str, Any]]]:
    """Every slot ended alike on both islands. Returns their events."""
    first, second = (rounds(island.folder) for island in islands)
    assert [e["round"] for e in first] == [e["round"] for e in second] == list(range(STEPS + 1))
    for mine, theirs in zip(first, second, strict=True):
        assert (mine["committed"], mine["digest"], mine["version"]) == (
            theirs["committed"], theirs["digest"], theirs["version"],
        ), f"slot {mine['round']}"  # fmt: skip
    for name, parameter in islands[0].model.named_parameters():
        assert torch.equal(parameter, islands[1].model.get_parameter(name))
    return [first, second]


def cut_bulk(times: int) -> tuple[Callable[[list[CutIsland]], None], list[int]]:
    """Cut gloo's sockets in the middle of the slot's bulk, in its first ``times`` tries."""
    cuts: list[int] = []

    def plant(islands: list[CutIsland]) -> None:
        keep = set().union(*(island.ports() for island in islands))
        sender = islands[0].transport._bulk
        exchange = sender.exchange
        local = threading.local()

        def noted(me: Any, effect: Bulk, store: str) -> Any:
            local.slot, local.chunks = effect.attempt[0], 0
            return exchange(me, effect, store)

        def take(size: float) -> None:
            local.chunks += 1
            if local.slot == SLOT and local.chunks == 7 and len(cuts) < times:
                cuts.append(cut_gloo(keep))

        sender.exchange = noted  # type: ignore[method-assign]
        sender._bucket.take = take  # type: ignore[method-assign]

    return plant, cuts


@pytest.mark.parametrize("overlap", [0, 1])
def test_fr35_a_bulk_cut_once_is_tried_again_and_both_commit_the_same_bits(lighthouse, overlap, tmp_path):
    plant, cuts = cut_bulk(1)
    islands = run(lighthouse, tmp_path, overlap, plant)
    assert len(cuts) == 1 and cuts[0] >= 1
    first, _ = check_same_bits(islands)
    assert all(event["committed"] for event in first if islands[0].headers[event["round"]].steps)
    # What the broken try had sent is on the bill as well.
    assert first[SLOT - 2]["bytes_sent"] == 4 * SIZE
    assert 4 * SIZE + 7 * CHUNK <= first[SLOT]["bytes_sent"] <= 4 * SIZE + (8 + bulk.AHEAD) * CHUNK


@pytest.mark.parametrize("overlap", [0, 1])
def test_fr35_a_bulk_cut_in_every_try_changes_nothing_on_either_island(lighthouse, overlap, tmp_path):
    plant, cuts = cut_bulk(1000)
    islands = run(lighthouse, tmp_path, overlap, plant)
    # A try that a new membership broke before it could be cut is one of them.
    assert 1 <= len(cuts) <= 3 and min(cuts) >= 1, "three tries are all a slot gets"
    events = check_same_bits(islands)
    for island, mine in zip(islands, events, strict=True):
        assert not mine[SLOT]["committed"] and mine[SLOT]["bytes_sent"] > 0
        assert mine[SLOT]["digest"] == mine[0]["digest"] and mine[SLOT]["version"] == 1
        assert mine[SLOT + 2]["committed"]
        assert island.bulks[SLOT + 2] == 1, "what is left of the broken group got in the way of the next slot"
        # The fragment is merged at its next slot, over two windows instead of one.
        assert island.headers[SLOT + 2].steps == 4 - overlap
        before, after = island.values[SLOT + overlap]
        assert torch.equal(before, after), "a failed slot has changed the island's parameters"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("sides", [(0, 1), (0,)], ids=["both ways", "one way"])
def test_fr35_a_confirmation_that_is_cut_off_still_ends_alike_on_both_islands(
    lighthouse, overlap, sides, tmp_path
):
    """The link is away for two seconds from the moment an island has merged and is about to say so."""
    cut = threading.Event()

    def plant(islands: list[CutIsland]) -> None:
        first, second = (island.transport._protocol for island in islands)
        done, others_done = first.bulk_done, second.bulk_done

        def cut_first(attempt: tuple[int, str], payloads: Any) -> Any:
            if attempt[0] == SLOT:
                for i in sides:
                    server = islands[i].transport._server
                    assert isinstance(server, ProxiedServer)
                    server.proxy.cut(2.0)
                cut.set()
            return done(attempt, payloads)

        def after_the_cut(attempt: tuple[int, str], payloads: Any) -> Any:
            """Else the other's confirmation may be there before the link is away."""
            assert attempt[0] != SLOT or cut.wait(timeout=10)
            return others_done(attempt, payloads)

        first.bulk_done, second.bulk_done = cut_first, after_the_cut  # type: ignore[method-assign]

    islands = run(lighthouse, tmp_path, overlap, plant)
    assert cut.is_set()
    first, second = check_same_bits(islands)
    assert first[SLOT]["committed"]
    assert max(first[SLOT]["exchange_s"], second[SLOT]["exchange_s"]) > 1.0, "nothing was cut"


def test_fr34_a_tensor_larger_than_what_moves_at_once_is_exchanged_whole(lighthouse, tmp_path):
    islands = run(lighthouse, tmp_path, 0, lambda islands: None)
    first, _ = check_same_bits(islands)
    assert any(event["committed"] for event in first)
    for parameter in islands[0].model.parameters():
        assert torch.equal(parameter, parameter[:1].expand(SIZE)), "some rows were left out"
