"""Five gateways on real sockets, whose slices have owners: what arrives, what it costs, and what a lost owner does."""

import time
from functools import partial

import pytest
import torch

from tests.integration.exchange.test_gloo_transport import FRAGMENTS, SIZE, Gateway, leave, together
from torchtitan_diloco.config.own import CodecConfig, LighthouseConfig, MergeConfig
from torchtitan_diloco.exchange import bulk
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.outer.slices import Division
from torchtitan_diloco.outer.values import Flat
from torchtitan_diloco.semi_sync.wire import Wire

ISLANDS = 5
LOSSY = CodecConfig(wire="int8", error_feedback=True)


class Owner(Gateway):
    """With the production wire, which cuts, encodes and merges."""

    def __init__(
        self, lighthouse: LighthouseConfig, island: int, codec: CodecConfig = LOSSY, **settings
    ) -> None:
        self.wire = Wire(codec, MergeConfig(weight="equal"), FRAGMENTS, "run", island, ISLANDS)
        super().__init__(lighthouse, island, merge=self.wire.merge, **settings)

    def send(self, finite: bool = True) -> torch.Tensor:
        """Offer a delta that differs from place to place, island to island and slot to slot. Returns it."""
        seed = torch.Generator().manual_seed(1000 * self.state.slot + self.island)
        delta = torch.randn(SIZE, generator=seed)
        given = delta.clone()
        payload = self.wire.encode(0, self.state.slot, Flat(delta)) if finite else self.wire.blank(0)
        self.offer(0.0, finite=finite, payload=payload)
        return given

    def settle(self, timeout_s: float = 20.0) -> Outcome:
        outcome = super().settle(timeout_s)
        committed = outcome.status == "committed"
        self.wire.settle(0, outcome.slot, committed, committed and self.island in outcome.participants)
        return outcome


def founded(lighthouse: LighthouseConfig, **settings) -> list[Owner]:
    gateways = [Owner(lighthouse, island, **settings) for island in range(ISLANDS)]
    together(*(partial(gateway.join, ISLANDS) for gateway in gateways))
    return gateways


def division_of(gateway: Owner) -> Division:
    return Division(tuple(range(ISLANDS)), gateway.wire.merge.sizes(0))


@pytest.mark.parametrize("streams", [1, 3])
def test_five_islands_take_the_same_bits_and_send_two_shares_each(
    patient_lighthouse: LighthouseConfig,
    monkeypatch: pytest.MonkeyPatch,
    streams: int,
) -> None:
    monkeypatch.setattr(bulk, "CHUNK", 70)  # of slices of 198 to 246 bytes, so that several move at once
    gateways = founded(patient_lighthouse, streams=streams)
    sizes = division_of(gateways[0]).sizes
    assert len(set(sizes)) > 1, "slices of one length prove less"
    whole = sum(sizes)
    for slot in range(3):
        deltas = [gateway.send() for gateway in gateways]
        outcomes = [gateway.settle() for gateway in gateways]
        for island, outcome in enumerate(outcomes):
            assert outcome.status == "committed" and outcome.slot == slot
            assert outcome.participants == tuple(range(ISLANDS)) and outcome.weights == (0.2,) * ISLANDS
            own = sizes[island]
            assert outcome.bytes_sent == whole - own + 4 * own
            assert outcome.bytes_received == 4 * own + whole - own
            assert torch.equal(gateways[island].merged, gateways[0].merged)
            mean = torch.stack(deltas).mean(0)
            # Two encodings with 127 levels of at most 4 or so, and the last slot's residuals.
            torch.testing.assert_close(gateways[island].merged, mean, rtol=0, atol=0.1)
        assert sum(o.bytes_sent for o in outcomes) == sum(o.bytes_received for o in outcomes) == 8 * whole
    assert len({g.state.states[0].digest for g in gateways}) == len({g.state.lineage for g in gateways}) == 1
    assert [len(g.wire.merge.residuals()) for g in gateways] == [1] * ISLANDS
    leave(*gateways)


def test_float32_through_owners_is_what_one_island_would_merge_of_all_payloads(
    patient_lighthouse: LighthouseConfig,
) -> None:
    gateways = founded(patient_lighthouse, codec=CodecConfig())
    deltas = [gateway.send() for gateway in gateways]
    outcomes = [gateway.settle() for gateway in gateways]
    expected = deltas[0] * torch.tensor(0.2)
    for delta in deltas[1:]:
        expected += delta * torch.tensor(0.2)
    for gateway, outcome in zip(gateways, outcomes, strict=True):
        assert torch.equal(gateway.merged, expected)
        assert outcome.bytes_sent == outcome.bytes_received == 2 * 4 * 4 * SIZE // 5
    leave(*gateways)


def test_a_listener_owns_a_slice_and_sends_no_delta(patient_lighthouse: LighthouseConfig) -> None:
    gateways = founded(patient_lighthouse)
    sizes = division_of(gateways[0]).sizes
    for gateway in gateways:
        gateway.send(finite=gateway.island != 2)
    outcomes = [gateway.settle() for gateway in gateways]
    assert {o.participants for o in outcomes} == {(0, 1, 3, 4)}
    assert outcomes[2].bytes_sent == 4 * sizes[2]
    assert outcomes[0].bytes_received == 3 * sizes[0] + sum(sizes[1:])
    assert len({g.state.states[0].digest for g in gateways}) == 1
    leave(*gateways)


@pytest.mark.parametrize("stage", ["slices", "merged"])
def test_when_an_owner_dies_in_the_middle_the_other_four_gather_everything(
    lighthouse: LighthouseConfig,
    stage: str,
) -> None:
    gateways = founded(lighthouse)
    for gateway in gateways:
        gateway.send()
    for gateway in gateways:
        assert gateway.settle().status == "committed"
    kept = [gateway.wire.merge.residuals() for gateway in gateways]
    lost = gateways[3]
    carry = lost.transport._carry

    def die(effect: bulk.Bulk) -> None:
        if effect.stage == stage:
            lost.crash()
        else:
            carry(effect)

    lost.transport._carry = die  # type: ignore[method-assign]
    deltas = [gateway.send() for gateway in gateways]
    rest = [gateway for gateway in gateways if gateway is not lost]
    began = time.monotonic()
    outcomes = [gateway.settle() for gateway in rest]
    assert time.monotonic() - began < 8.0, "the time-out was waited for"
    whole = sum(division_of(lost).sizes)
    for gateway, outcome in zip(rest, outcomes, strict=True):
        assert outcome.status == "committed" and outcome.participants == (0, 1, 2, 4)
        # Whole payloads in the end, and before that what was dealt out.
        dealt = outcome.bytes_sent - 3 * whole
        assert 0 <= dealt < 2 * whole and (dealt > 0 or stage == "slices")
        mean = torch.stack([d for i, d in enumerate(deltas) if i != 3]).mean(0)
        torch.testing.assert_close(gateway.merged, mean, rtol=0, atol=0.1)
    assert len({g.state.states[0].digest for g in rest}) == 1
    for gateway in rest:  # nothing was encoded a second time, so nothing more was lost
        for name, values in kept[gateway.island].items():
            assert torch.equal(gateway.wire.merge.residuals()[name], values)
    leave(*rest)


def test_both_stages_are_paced(patient_lighthouse: LighthouseConfig) -> None:
    rate = 2000.0  # bytes a second
    gateways = founded(patient_lighthouse, codec=CodecConfig(), max_rate=rate * 8 / 1e6)
    began = time.monotonic()
    for gateway in gateways:
        gateway.send()
    outcomes = [gateway.settle() for gateway in gateways]
    taken = time.monotonic() - began
    # A stage is one collective here. The burst lets the first go in debt; the second waits for it.
    first = outcomes[0].bytes_sent / 2
    assert (first - 0.1 * rate) / rate * 0.9 < taken < 8.0
    leave(*gateways)
