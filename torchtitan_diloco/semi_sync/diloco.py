"""DiLoCo and local SGD: H inner steps, then the islands' deltas are merged and an outer optimizer moves the anchor.

DiLoCo: arXiv 2311.08105, Algorithm 1. Local SGD is the same with outer lr 1 and no momentum (the mean of the parameters).
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.protocol import Merge
from torchtitan_diloco.exchange.transport import Heal, Hello, Joined, Transport
from torchtitan_diloco.outer.delta import pseudo_gradient
from torchtitan_diloco.outer.digest import is_finite
from torchtitan_diloco.outer.fragments import fingerprint, whole_model
from torchtitan_diloco.outer.merge import mean
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.slots import SlotClock
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.semi_sync.method import SemiSync, Setup, register_semi_sync
from torchtitan_diloco.semi_sync.share import DataShare
from torchtitan_diloco.semi_sync.waiting import in_background, wait_for

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5


@register_semi_sync("diloco")
class DiLoCo(SemiSync):
    """One fragment (the whole model), exchanged every ``sync_every`` inner steps while training waits."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.group = setup.group
        self.parameters = setup.parameters
        self.fragments = whole_model(list(setup.parameters.specs.values()))
        self.clock = SlotClock(setup.config.sync_every, setup.steps, len(self.fragments))
        self.optimizer = self.make_optimizer()
        self.merge = self.make_merge()
        self.withdrawn = False  # the last slot was given up, since the island is to stop
        self.steps = 0  # inner steps, and tokens, since the last applied slot
        self.tokens = 0
        self.outer: OuterState | None = None  # on the gateway
        self.transport: Transport | None = None  # on the gateway
        self.finite = True  # the delta of the slot in flight; on the gateway
        self.open: tuple[int, float] | None = None  # the slot in flight, and when it began
        self.data = DataShare(setup.feed, setup.ledger, setup.group, setup.island)

    def make_optimizer(self) -> OuterSGD:
        outer = self.setup.config.outer
        if outer.name != "sgd":
            raise UserError(f'semi_sync.outer.name: "{outer.name}" is not an outer optimizer; there is "sgd"')
        return OuterSGD(outer.lr, outer.momentum, outer.nesterov)

    # ---- entering --------------------------------------------------------------------------------------------------

    def join(self, step: int) -> int:
        if self._finished(step):
            return step
        anchors = [self.parameters.snapshot(fragment) for fragment in self.fragments]
        future: Future[Joined] | None = None
        if self.group.is_gateway:
            if self.outer is None:
                self.outer = self._found([a for a in anchors if a is not None])
            future = in_background(self._enter, step)
        joined = self._await_state(future)
        if joined.heals:
            step = joined.step
            self._adopt(joined.heals)
        self.data.enter(self.outer, joined.present, healed=bool(joined.heals))
        self.setup.trace.step = step
        slot = self.group.tell(self.outer.slot if self.outer else None)
        self.setup.trace.event("join", slot=slot)
        if self.setup.dump_sends and self.outer and step == 0:
            self._dump("founding", [state.anchor for state in self.outer.states])
        reached = self.clock.slot_after(step)
        due = self.clock.first_slot_from(step) - 1 if reached is None else reached
        # Stopped, or admitted, between a slot's last inner step and its outcome: the slot comes first.
        return self.exchange(due, step) if slot <= due else self._sit_out(step)

    def _found(self, anchors: list[torch.Tensor]) -> OuterState:
        return OuterState.found(self.fragments, self.optimizer, anchors, self.setup.config.num_islands)

    def _finished(self, step: int) -> bool:
        """Whether the restored state is the end of the run, with nothing left to agree on."""
        last = self.clock.slot_after(step) if step >= self.setup.steps else None
        return bool(self.group.tell(last is not None and self.outer is not None and self.outer.slot > last))

    def _enter(self, step: int) -> Joined:
        assert self.outer is not None
        self.transport = self.setup.make_transport(self.merge)
        return self.transport.join(self._hello(step), self.outer)

    def make_merge(self) -> Merge:
        merge = self.setup.config.merge
        if merge.method != "mean":
            raise UserError(f'semi_sync.merge.method: "{merge.method}" is not a merge rule; there is "mean"')
        return partial(mean, kind=merge.weight)

    def _hello(self, step: int) -> Hello:
        return Hello(
            island=self.setup.island,
            incarnation=self.setup.incarnation,
            started=self.setup.started,
            run_id=self.setup.run_id,
            num_islands=self.setup.config.num_islands,
            settings={**self.setup.settings, "the model's parameters": fingerprint(self.fragments)},
            step=step,
        )

    def _await_state(self, future: "Future[Joined] | None") -> Joined:
        """Wait, with all ranks, for a join or heal that runs on the gateway."""

        def poll() -> Joined | None:
            assert future is not None
            done, _ = wait([future], timeout=POLL_S)
            return future.result() if done else None

        return self._wait(poll, lambda: self.transport.stop() if self.transport else None)

    def _adopt(self, heals: tuple[Heal, ...]) -> None:
        """Train on from the anchor just taken from another island."""
        for i, fragment in enumerate(self.fragments):
            self.parameters.scatter(fragment, self.outer.states[i].anchor if self.outer else None)
        self.steps = self.tokens = 0
        if not heals:  # nobody there holds more than this island after all
            return
        # Where the run moved on meanwhile, the state was taken more than once; to the island it is one heal.
        self.setup.trace.event(
            "heal",
            source=heals[-1].source,
            bytes=sum(heal.bytes for heal in heals),
            seconds=sum(heal.seconds for heal in heals),
            version=heals[-1].version,
        )

    # ---- a slot ----------------------------------------------------------------------------------------------------

    def after_inner_step(self, step: int, tokens: int) -> int:
        slot = self.count(step, tokens)
        return step if slot is None else self.exchange(slot, step)

    def count(self, step: int, tokens: int) -> int | None:
        """Account for an inner step; the slot that is due after it, if one is."""
        self.steps += 1
        self.tokens += tokens
        self.data.stepped(self.outer)
        if self.transport:
            self.transport.progress(step)
        return self.clock.slot_after(step)

    def exchange(self, slot: int, step: int) -> int:
        """One whole slot, due at ``step``; training waits for it. Returns the step to go on from."""
        return self._sit_out(self._attempt(slot, step))

    def _attempt(self, slot: int, step: int) -> int:
        self.send(slot)
        outcome: Outcome = self._wait(
            self.poll, lambda: self.transport.withdraw() if self.transport else None
        )
        self.withdrawn = outcome.status == "withdrawn"
        return self.settle(outcome, step)

    def _sit_out(self, step: int) -> int:
        """Without data to read, the island only listens, from slot to slot, until a committed one gives it some."""
        while self.data.idle and step < self.setup.steps and not self.withdrawn:
            slot = self.clock.first_slot_from(step)
            step = self._attempt(slot, self.clock.due(slot))
            if self.transport:
                self.transport.progress(step)
        return step

    def send(self, slot: int) -> None:
        """Snapshot the due fragment and offer its delta."""
        began = time.monotonic()
        index = self.clock.fragment_of(slot)
        fragment = self.fragments[index]
        local = self.parameters.snapshot(fragment)
        self.open = (slot, began)
        if not self.group.is_gateway:
            return
        assert self.outer is not None and self.transport is not None and local is not None
        if self.setup.dump_sends:
            self._dump(f"slot-{slot:06d}", [local])
        state = self.outer.states[index]
        delta = pseudo_gradient(fragment, state.anchor, local)
        self.finite = is_finite(delta)
        header = Header(
            island=self.setup.island,
            slot=slot,
            fragment=index,
            version=state.version,
            digest=state.digest,
            lineage=self.outer.lineage,
            tokens_total=self.outer.tokens_total,
            steps=self.steps,
            tokens=self.tokens,
            finite=self.finite,
            **self.data.header(self.outer),
        )
        self.transport.offer(header, delta)

    def poll(self, timeout_s: float = POLL_S) -> Outcome | None:
        """The outcome of the open slot, if it is known; on the gateway, which takes the outer step."""
        assert self.transport is not None and self.outer is not None
        outcome = self.transport.result(timeout_s)
        if outcome is None:
            return None
        if outcome.status == "committed":
            assert outcome.merged is not None
            index = self.clock.fragment_of(outcome.slot)
            participants = list(outcome.participants)
            before = self.outer.copy()
            self.outer.commit(
                outcome.slot,
                index,
                outcome.merged,
                participants,
                outcome.tokens,
                outcome.advanced,
                outcome.members,
            )
            self.data.committed(before, self.outer, outcome)
        elif outcome.status == "failed":
            self.outer.fail(outcome.slot)
        self.transport.publish(self.outer)
        return replace(outcome, merged=None)

    def settle(self, outcome: Outcome, step: int) -> int:
        """Act on the outcome, on all ranks: a committed slot's anchor replaces the local parameters."""
        assert self.open is not None
        index = self.clock.fragment_of(outcome.slot)
        if outcome.status == "committed":
            self.parameters.scatter(
                self.fragments[index], self.outer.states[index].anchor if self.outer else None
            )
            self.steps = self.tokens = 0
        elif outcome.status == "behind":
            future = in_background(self.transport.heal, self.outer) if self.transport and self.outer else None
            joined = self._await_state(future)
            step = joined.step
            self._adopt(joined.heals)
            self.data.enter(self.outer, joined.present, healed=True)
        elif outcome.status == "failed" and not self.group.tell(self.finite):
            # Only non-finite state is thrown away: kept, it would fail every slot to come.
            self.parameters.scatter(
                self.fragments[index], self.outer.states[index].anchor if self.outer else None
            )
            self.steps = self.tokens = 0
            self.data.discard(self.outer)
        self.data.settle(self.outer, outcome)
        if outcome.status != "withdrawn":
            self._trace_round(outcome, index, time.monotonic() - self.open[1])
        self.open = None
        return step

    def _trace_round(self, outcome: Outcome, index: int, stall_s: float) -> None:
        if self.outer is None:
            return
        state = self.outer.states[index]
        committed = outcome.status == "committed"
        self.setup.trace.event(
            "round",
            round=outcome.slot,
            fragment=index,
            version=state.version,
            method=self.setup.config.method,
            participants=list(outcome.participants),
            weights=list(outcome.weights),
            tokens=outcome.tokens,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            exchange_s=outcome.exchange_s,
            stall_s=stall_s,
            committed=committed,
            digest=state.digest,
        )
        if not committed:
            logger.warning("slot %d %s: %s", outcome.slot, outcome.status, outcome.reason)

    # ---- the rest --------------------------------------------------------------------------------------------------

    def _wait(self, poll: Callable[[], T | None], on_drain: Callable[[], None]) -> T:
        setup = self.setup
        waiting = lambda: self.transport.waiting() if self.transport else None
        return wait_for(setup.group, setup.trace, setup.drain, poll, waiting=waiting, on_drain=on_drain)

    def _dump(self, name: str, flats: list[torch.Tensor]) -> None:
        assert self.setup.dump_sends is not None
        self.setup.dump_sends.mkdir(parents=True, exist_ok=True)
        tensors = {
            spec.name: view.contiguous()
            for fragment, flat in zip(self.fragments, flats, strict=True)
            for spec, view in fragment.views(flat)
        }
        counts = {"steps": str(self.steps), "tokens": str(self.tokens)}
        save_file(tensors, self.setup.dump_sends / f"{name}.safetensors", metadata=counts)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self.outer is None:
            return {}, {}
        own = {"steps": self.steps, "tokens": self.tokens, "layout": fingerprint(self.fragments)}
        own |= self.data.state()
        return {"outer": self.outer.describe(), "own": own}, self.outer.tensors()

    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        own = description["own"]
        if own["layout"] != fingerprint(self.fragments):
            raise ValueError("the checkpoint's outer state belongs to a model with other parameters")
        self.steps, self.tokens = int(own["steps"]), int(own["tokens"])
        self.data.restore(own)
        if self.group.is_gateway:
            blank = [torch.empty(0, dtype=torch.float32) for _ in self.fragments]
            self.outer = self._found(blank)
            self.outer.restore(description["outer"], tensors)

    def leave(self, reason: str) -> None:
        if self.transport is not None:
            self.transport.leave(reason)
            self.setup.trace.event("leave", reason=reason)
            self.transport = None


@register_semi_sync("local_sgd")
class LocalSGD(DiLoCo):
    """Local SGD: the anchor becomes the weighted mean of the islands' parameters (``semi_sync.outer`` is not used)."""

    def make_optimizer(self) -> OuterSGD:
        return OuterSGD(lr=1.0)
