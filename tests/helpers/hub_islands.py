"""Islands that do nothing but exchange over a real hub: each in a thread, with the production transport."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_diloco.config.own import (
    CodecConfig,
    IslandConfig,
    LighthouseConfig,
    MergeConfig,
    TransportConfig,
)
from torchtitan_diloco.exchange.hub import HubTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.transport import Hello, Joined
from torchtitan_diloco.outer.fragments import Fragment, Piece, TensorSpec
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.outer.values import Flat
from torchtitan_diloco.semi_sync.wire import Wire

RUN = "run"


def fragments_of(sizes: tuple[int, ...]) -> tuple[Fragment, ...]:
    specs = [TensorSpec(f"w{i}", (size,), torch.float32) for i, size in enumerate(sizes)]
    return tuple(Fragment(i, (Piece(spec, 0, 0, spec.numel),)) for i, spec in enumerate(specs))


def settings_of(islands: int, codec: CodecConfig, steps: int) -> dict[str, Any]:
    """What islands agree on, as far as a hub looks at it."""
    return {
        "semi_sync.num_islands": islands,
        "semi_sync.method": "diloco",
        "semi_sync.sync_every": 4,
        "training.steps": steps,
        "semi_sync.codec.wire": codec.wire,
        "semi_sync.codec.block": codec.block,
        "semi_sync.codec.density": codec.density,
        "semi_sync.codec.rounding": codec.rounding,
        "semi_sync.codec.error_feedback": codec.error_feedback,
        "semi_sync.merge.method": "mean",
        "semi_sync.merge.weight": "tokens",
        "semi_sync.outer.lr": 0.7,
        "semi_sync.outer.momentum": 0.9,
        "semi_sync.outer.nesterov": True,
        "semi_sync.outer.schedule": "constant",
        "semi_sync.outer.min_lr_factor": 0.1,
    }


def delta_of(island: int, slot: int, size: int) -> torch.Tensor:
    """What an island sends in a slot: always the same, so that a run with faults must end where one without does."""
    generator = torch.Generator().manual_seed(1000 * island + slot)
    return torch.randn(size, generator=generator)


@dataclass
class HubIsland:
    """steps and tokens of its windows; statuses: of its slots, in order."""

    island: int
    urls: list[str]
    islands: int = 2
    sizes: tuple[int, ...] = (1000,)
    codec: CodecConfig = field(default_factory=CodecConfig)
    incarnation: str = "a"
    started: float = 0.0
    transport_config: TransportConfig | None = None
    transport_class: type[HubTransport] = HubTransport
    patience_s: float = 60.0
    found: str = "wait_all"
    steps: int = 4000
    state: OuterState = field(init=False)
    statuses: list[tuple[int, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    heals: int = 0

    def __post_init__(self) -> None:
        fragments = fragments_of(self.sizes)
        anchors = [torch.zeros(size) for size in self.sizes]
        self.state = OuterState.found(
            fragments, OuterSGD(0.7, 0.9, True), anchors, self.islands, hand_over=False
        )
        self.wire = Wire(self.codec, MergeConfig(), fragments, RUN, self.island, self.islands)
        transport = self.transport_config or TransportConfig(kind="hub", urls=self.urls, streams=2)
        self.transport_kind = transport.kind
        self.transport = self.transport_class(
            IslandConfig(id=self.island), LighthouseConfig(patience_s=self.patience_s, heartbeat_interval_s=0.1),
            transport, self.wire.merge,
        )  # fmt: skip

    def join(self) -> Joined:
        hello = Hello(
            self.island, self.incarnation, self.started, RUN, self.islands,
            settings_of(self.islands, self.codec, self.steps)
            | {"transport.kind": self.transport_kind, "semi_sync.found": self.found},
            0,
            found=self.found,
        )  # fmt: skip
        joined = self.transport.join(hello, self.state)
        self.heals += len(joined.heals)
        return joined

    def offer(self, slot: int, steps: int = 4) -> None:
        fragment = slot % len(self.sizes)
        held = self.state.states[fragment]
        header = Header(
            self.island, slot, fragment, held.version, held.digest, held.lineage, held.tokens, steps,
            10 * steps, True, {f"a/{self.island}": slot + 1}, {}, {"a": "0-9"}, False,
        )  # fmt: skip
        payload = self.wire.encode(fragment, slot, Flat(delta_of(self.island, slot, self.sizes[fragment])))
        self.transport.offer(header, payload, self.state.outer_step(fragment, slot))

    def settle(self, slot: int, seconds: float = 60.0) -> Outcome:
        """Wait for a slot and act on it."""
        fragment = slot % len(self.sizes)
        version = self.state.states[fragment].version
        outcome = self.transport.result(slot, seconds)
        assert outcome is not None, f"slot {slot} of island {self.island}: no outcome after {seconds} s"
        self.statuses.append((slot, outcome.status))
        self.outcomes.append(outcome)
        committed = outcome.status == "committed" and self.state.states[fragment].version == version
        self.wire.settle(fragment, slot, committed, committed and self.island in outcome.participants)
        if committed:
            assert outcome.advance is not None
            self.state.commit(
                slot, fragment, outcome.advance, list(outcome.participants), outcome.tokens, outcome.advanced,
                outcome.members,
            )  # fmt: skip
        elif outcome.status == "failed":
            self.state.fail(slot)
        elif outcome.status == "behind":
            self.heals += len(self.transport.heal(self.state).heals)
        self.transport.publish(self.state)
        return outcome

    def run(self, slots: int) -> None:
        """All slots from where its state stands, each until it is over."""
        while self.state.slot < slots:
            slot = self.state.slot
            self.offer(slot)
            self.settle(slot)


def together(calls: list[Any], seconds: float = 120.0) -> None:
    """Run the calls in threads of their own, to their end. Raises what one of them raises."""
    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.1)
            seconds -= 0.1
            assert seconds > 0, "not done in time"
    if errors:
        raise errors[0]
