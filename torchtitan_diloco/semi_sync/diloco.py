"""DiLoCo, streaming DiLoCo and local SGD: inner steps, then deltas are merged and an outer optimizer moves the anchor.

DiLoCo: arXiv 2311.08105, Algorithm 1. Streaming DiLoCo: arXiv 2501.18512, in fragments and while training goes on. Local SGD
is DiLoCo with outer lr 1 and no momentum (the mean of the parameters).
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.transport import Hello, Joined, Transport
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.delta import PseudoGradient
from torchtitan_diloco.outer.fragments import fingerprint
from torchtitan_diloco.outer.optimizer import OuterSGD, Schedule
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.slots import SlotClock
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.outer.values import whole
from torchtitan_diloco.semi_sync.forks import keeping
from torchtitan_diloco.semi_sync.fragments import dump, partition
from torchtitan_diloco.semi_sync.method import SemiSync, Setup, register_semi_sync
from torchtitan_diloco.semi_sync.share import DataShare
from torchtitan_diloco.semi_sync.waiting import in_background, wait_for
from torchtitan_diloco.semi_sync.wire import Wire

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5


@dataclass(slots=True)
class Flight:
    """A slot that this island has sent and not yet applied.

    apply_at: the inner step after which it is applied. version: of the anchor its delta is based on. stall_s: time that
    training stood still for it.
    """

    slot: int
    fragment: int
    apply_at: int
    version: int
    stall_s: float
    finite: bool = True


@register_semi_sync("diloco")
class DiLoCo(SemiSync):
    """Streaming DiLoCo (arXiv 2501.18512); with one fragment and no overlap it is DiLoCo.

    Every fragment is sent once in ``sync_every`` inner steps, one after the other. Its merged result is applied ``overlap``
    steps later, while training goes on: local = alpha * local + (1 - alpha) * new anchor.
    """

    retry_s = POLL_S

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.group = setup.group
        self.parameters = setup.parameters
        self.fragments = partition(setup.config, list(setup.parameters.specs.values()))
        self.clock = SlotClock(setup.config.sync_every, setup.steps, len(self.fragments), setup.sync_every)
        self.optimizer = self.make_optimizer()
        self.steps = [0] * len(self.fragments)  # inner steps, and tokens, since the fragment was last applied
        self.tokens = [0] * len(self.fragments)
        self.next_slot = 0  # to send
        self.flights: list[Flight] = []  # in the order of their slots
        self.failures = 0  # slots in a row
        self.withdrawn = False  # a slot was given up, since the island is to stop
        self.wire = self.make_wire()
        self.data = DataShare(setup.feed, setup.ledger, setup.group, setup.island)
        # Shards change hands only where everybody stops reading at the slot that settles them.
        self.hand_over = len(self.fragments) == 1 and setup.config.overlap == 0
        self.outer: OuterState | None = None  # on the gateway
        self.transport: Transport | None = None  # on the gateway

    def make_optimizer(self) -> OuterSGD:
        outer = self.setup.config.outer
        if outer.name != "sgd":
            raise UserError(f'semi_sync.outer.name: "{outer.name}" is not an outer optimizer; there is "sgd"')
        schedule = Schedule(outer.schedule, outer.min_lr_factor, self.clock.slots)
        return OuterSGD(outer.lr, outer.momentum, outer.nesterov, schedule)

    def make_wire(self) -> Wire:
        setup, config = self.setup, self.setup.config
        # Ranks that are no gateways only learn of a wrong setting.
        fragments = self.fragments if self.group.is_gateway else ()
        return Wire(config.codec, config.merge, fragments, setup.run_id, setup.island, config.num_islands)

    # ---- entering --------------------------------------------------------------------------------------------------

    def join(self, step: int) -> int:
        if step >= self.clock.last_step and self.complete():
            self._help_others_finish(step)
            return step
        present = [self.parameters.present(fragment) for fragment in self.fragments]
        if self.group.is_gateway and self.outer is None:
            self.outer = self._found([whole(values) for values in present if values is not None])
        step = self._take_state(self._enter, step)
        self.setup.trace.step = step
        self.setup.trace.event("join", slot=self.next_slot)
        if self.setup.dump_sends and self.outer and step == 0:
            self._dump("founding", list(enumerate(state.anchor for state in self.outer.states)))
        # Stopped, or admitted, between a slot's last inner step and its outcome: the slot comes first.
        return self.exchange(step, at_once=True)

    def _help_others_finish(self, step: int) -> None:
        """An island that was lost near the end can finish only with the final state, which islands like this one hold."""
        if self.setup.config.num_islands == 1:
            return
        future = in_background(self._enter, step, True) if self.group.is_gateway else None
        try:
            self._wait(partial(self._look, future), self._stop_waiting)
        except (Resumable, UserError) as reason:  # whatever it is, this island is done
            logger.warning("this island has finished and leaves the others to themselves: %s", reason)

    def _found(self, anchors: list[torch.Tensor]) -> OuterState:
        islands = self.setup.config.num_islands
        return OuterState.found(self.fragments, self.optimizer, anchors, islands, self.hand_over)

    def complete(self) -> bool:
        return not self.flights and self.next_slot >= self.clock.slots

    def progress(self, step: int) -> int:
        return self.clock.progress(step)

    def last_step(self) -> int:
        return self.clock.last_step

    def _enter(self, step: int, finished: bool = False) -> Joined:
        assert self.outer is not None
        self.transport = self.setup.make_transport(self.wire.merge)
        hello = Hello(
            island=self.setup.island,
            incarnation=self.setup.incarnation,
            started=self.setup.started,
            run_id=self.setup.run_id,
            num_islands=self.setup.config.num_islands,
            settings={**self.setup.settings, "the model's parameters": fingerprint(self.fragments)},
            step=self.clock.progress(step),
            finished=finished,
            found=self.setup.config.found,
        )
        return self.transport.join(hello, self.outer)

    def _heal(self, step: int) -> Joined:
        assert self.outer is not None and self.transport is not None
        return self.transport.heal(self.outer)

    def _take_state(self, enter: Callable[[int], Joined], step: int) -> int:
        """Join or heal: train on from the anchors that another island has newer. Returns the step to go on from."""
        outer = self.outer
        before = [(s.digest, s.lineage) for s in outer.states] if outer else []
        future = (
            in_background(keeping, enter, step, outer, self.state, self.setup.trace)
            if self.group.is_gateway
            else None
        )
        joined = self._wait(partial(self._look, future), self._stop_waiting)
        changed, slot = self.group.tell(
            ([i for i, s in enumerate(outer.states) if (s.digest, s.lineage) != before[i]], outer.slot)
            if outer
            else None
        )
        for i in changed:
            self.parameters.scatter(self.fragments[i], outer.states[i].anchor if outer else None)
            self.steps[i] = self.tokens[i] = 0
            if self.group.is_gateway:
                self.wire.reset(i)
        for flight in [flight for flight in self.flights if flight.slot < slot]:
            self.flights.remove(flight)
            if self.group.is_gateway:
                self.wire.settle(flight.fragment, flight.slot, committed=False, counted=False)
        buffers.release()  # a heal needs more of them at once than slots do
        # An island that joins may come from slots that the run, in another history, has yet to attempt.
        self.next_slot = slot if enter == self._enter else max(self.next_slot, slot)
        if self.hand_over or enter == self._enter:
            self.data.enter(outer, joined.present, healed=bool(changed))
        if joined.heals:
            self.setup.trace.event("heal", **asdict(joined.as_one_heal()))
        return self.clock.own_step(joined.step) if changed else step

    def _look(self, future: Future[Joined] | None) -> Joined | None:
        assert future is not None
        done, _ = wait([future], timeout=POLL_S)
        return future.result() if done else None

    # ---- slots -----------------------------------------------------------------------------------------------------

    def after_inner_step(self, step: int, tokens: int) -> int:
        self.count(step, tokens)
        return self.exchange(step)

    def count(self, step: int, tokens: int) -> None:
        """Account for an inner step."""
        self.steps = [steps + 1 for steps in self.steps]
        self.tokens = [seen + tokens for seen in self.tokens]
        self.data.stepped(self.outer)
        if self.transport:
            self.transport.progress(self.clock.progress(step))

    def exchange(self, step: int, at_once: bool = False) -> int:
        """Apply what is due after ``step``, then send what is due (in this order); training waits only for the former.

        at_once: apply everything. Without data to read, the island goes on listening, from slot to slot, until a committed
        one gives it some. Returns the step to go on from.
        """
        self.withdrawn = False
        step = self._exchange(step, at_once)
        while self.data.idle and step < self.clock.last_step and not self.withdrawn:
            step = self._exchange(max(step, self.clock.due(self.next_slot)), at_once=True)
            if self.transport:
                self.transport.progress(self.clock.progress(step))
        return step

    def _exchange(self, step: int, at_once: bool) -> int:
        step = self.apply(step, at_once)
        while self.next_slot < self.clock.reached(step) and not self.withdrawn:
            self.send(self.next_slot, step)
            self.next_slot += 1
            step = self.apply(step, at_once)
        return step

    def apply(self, step: int, at_once: bool = False) -> int:
        """Wait for the outcomes that are due after ``step`` and act on them. Returns the step to go on from."""
        last = step >= self.clock.last_step
        while self.flights and (at_once or last or self.flights[0].apply_at <= step):
            began = time.monotonic()
            outcome = self._wait(partial(self.poll, self.flights[0]), self._withdraw)
            step = self.settle(outcome, step, began)
        return step

    def send(self, slot: int, step: int) -> None:
        """Offer the delta of the slot's fragment, as it is now."""
        began = time.monotonic()
        index = self.clock.fragment_of(slot)
        fragment = self.fragments[index]
        local = self.parameters.present(fragment)
        flight = Flight(slot, index, step + self.setup.config.overlap, 0, 0.0)
        self.flights.append(flight)
        self.flights.sort(key=lambda f: f.slot)
        if self.group.is_gateway:
            assert self.outer is not None and self.transport is not None and local is not None
            if self.setup.dump_sends:
                self._dump(f"slot-{slot:06d}", [(index, whole(local))])
            state = self.outer.states[index]
            flight.version = state.version
            delta = PseudoGradient(fragment, state.anchor, local)
            payload = self.wire.encode(index, slot, delta)
            if not delta.finite:
                payload = self.wire.blank(index)
            header = Header(
                island=self.setup.island,
                slot=slot,
                fragment=index,
                version=state.version,
                digest=state.digest,
                lineage=state.lineage,
                tokens_total=state.tokens,
                steps=self.steps[index],
                tokens=self.tokens[index],
                finite=delta.finite,
                **self.data.header(self.outer),
            )
            flight.finite = header.finite
            self.transport.offer(header, payload, self.outer.outer_step(index, slot))
        flight.stall_s = time.monotonic() - began

    def poll(self, flight: Flight, timeout_s: float = POLL_S) -> Outcome | None:
        """The outcome of a flight, if it is known; on the gateway."""
        assert self.transport is not None and self.outer is not None
        outcome = self.transport.result(flight.slot, timeout_s)
        if outcome is None:
            return None
        if outcome.status == "committed" and self.outer.states[flight.fragment].version != flight.version:
            outcome = replace(outcome, status="behind", reason="taken from another island meanwhile")
        committed = outcome.status == "committed"
        counted = committed and self.setup.island in outcome.participants
        self.wire.settle(flight.fragment, flight.slot, committed, counted)
        if committed:
            assert outcome.advance is not None
            parent, positions = self.outer.lineage, dict(self.outer.positions)
            self.outer.commit(
                flight.slot,
                flight.fragment,
                outcome.advance,
                list(outcome.participants),
                outcome.tokens,
                outcome.advanced,
                outcome.members,
            )
            self.data.committed(parent, positions, self.outer, outcome)
        elif outcome.status == "failed":
            self.outer.fail(flight.slot)
        self.transport.publish(self.outer)
        return replace(outcome, advance=None)

    def settle(self, outcome: Outcome, step: int, began: float) -> int:
        """Act on the first flight's outcome, on all ranks."""
        flight = self.flights.pop(0)
        index = flight.fragment
        failed = outcome.status == "failed" and self.steps[index] > 0
        self.failures = self.failures + 1 if failed else 0
        if outcome.status == "committed":
            anchor = self.outer.states[index].anchor if self.outer else None
            self.parameters.scatter(self.fragments[index], anchor, self.setup.config.mix_alpha)
            self.steps[index] = self.tokens[index] = 0
        elif outcome.status == "behind":
            step = self._take_state(self._heal, step)
            slot = self.group.tell(self.outer.slot if self.outer else None)
            if slot <= flight.slot:  # whoever is past it has not published it yet, or is gone: ask again
                time.sleep(self.retry_s)
                self.send(flight.slot, step)
        elif outcome.status == "withdrawn":
            self.withdrawn = True
            self.next_slot = min(self.next_slot, flight.slot)
        if outcome.status in ("committed", "failed") and not self.group.tell(flight.finite):
            self._throw_away()
            if self.hand_over and outcome.status == "failed":
                self.data.discard(self.outer)
        if self.hand_over:
            self.data.settle(self.outer, outcome)
        if outcome.status != "withdrawn":
            self._trace_round(outcome, index, flight.stall_s + time.monotonic() - began)
        self._require_hope(outcome.reason)
        return step

    def _throw_away(self) -> None:
        """This island's state is not finite. Only such is thrown away, but all of it: what stayed would spoil the rest."""
        for i, fragment in enumerate(self.fragments):
            self.parameters.scatter(fragment, self.outer.states[i].anchor if self.outer else None)
            self.steps[i] = self.tokens[i] = 0
        if self.setup.replica is not None:
            self.setup.replica.drop_moments()

    def _require_hope(self, reason: str) -> None:
        """Whatever keeps slots from committing, GPU hours are not spent on it for ever."""
        most = self.setup.config.max_failed_slots
        if most and self.failures >= most:
            raise UserError(
                f"semi_sync.max_failed_slots = {most}: so many slots in a row have failed, the last one because {reason}; "
                "remove the cause, or raise it (0 = no limit)"
            )

    def pause(self) -> None:
        while self.flights:
            self._withdraw()
            outcome = self._wait(partial(self.poll, self.flights[0]), self._withdraw)
            self.settle(outcome, self.setup.trace.step, time.monotonic())

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

    def _withdraw(self) -> None:
        if self.transport:
            self.transport.withdraw()

    def _stop_waiting(self) -> None:
        if self.transport:
            self.transport.stop()

    def _wait(self, poll: Callable[[], T | None], on_drain: Callable[[], None]) -> T:
        setup = self.setup
        waiting = lambda: self.transport.waiting() if self.transport else None
        return wait_for(setup.group, setup.trace, setup.drain, poll, waiting=waiting, on_drain=on_drain)

    def _dump(self, name: str, flats: list[tuple[int, torch.Tensor]]) -> None:
        assert self.setup.dump_sends is not None
        last = flats[-1][0]
        counts = {"steps": self.steps[last], "tokens": self.tokens[last], "fragment": last}
        dump(self.setup.dump_sends / f"{name}.safetensors", self.fragments, flats, counts)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self.outer is None:
            return {}, {}
        own = {"steps": self.steps, "tokens": self.tokens, "layout": fingerprint(self.fragments)}
        own["sync_every"] = self._paces()
        own |= self.data.state()
        return {"outer": self.outer.describe(), "own": own}, self.outer.tensors() | self.wire.residuals()

    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        own = description["own"]
        if own["layout"] != fingerprint(self.fragments):
            raise ValueError("the checkpoint's outer state belongs to a model with other parameters")
        (every, run), (was, run_was) = self._paces(), own["sync_every"]
        if every * run_was != was * run:
            raise ValueError(
                f"the island made {was} steps for {run_was} of the run, and would make {every} for {run}, so its steps "
                "would be counted anew; set [[islands]] semi_sync.sync_every back"
            )
        self.steps, self.tokens = list(map(int, own["steps"])), list(map(int, own["tokens"]))
        self.data.restore(own)
        if self.group.is_gateway:
            blank = [torch.empty(0, dtype=torch.float32) for _ in self.fragments]
            self.outer = self._found(blank)
            self.outer.restore(description["outer"], tensors)
            self.wire.restore(tensors)
        self.next_slot = int(description["outer"]["slot"])

    def _paces(self) -> tuple[int, int]:
        return self.setup.sync_every or self.clock.sync_every, self.clock.sync_every

    def leave(self, reason: str) -> None:
        buffers.release()
        if self.transport is not None:
            self.transport.leave(reason)
            self.setup.trace.event("leave", reason=reason)
            self.transport = None


@register_semi_sync("local_sgd")
class LocalSGD(DiLoCo):
    """Local SGD: the anchor becomes the weighted mean of the islands' parameters (``semi_sync.outer`` is not used)."""

    def make_optimizer(self) -> OuterSGD:
        return OuterSGD(lr=1.0)
