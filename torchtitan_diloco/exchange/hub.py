"""Transport for islands that cannot reach one another: every one dials out to the hub, which decides, merges and keeps."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.hub_link import HubLink, Link, Unreachable
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.exchange.traffic import Traffic
from torchtitan_diloco.exchange.transport import (
    Heal,
    Hello,
    Joined,
    Transport,
    Waiting,
    register_transport,
)
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.slot import Record
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState, OuterStep, combine

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 2.0  # for how long one question for an outcome waits at the hub
RETRY_S = 0.5
SLOWEST_RETRY_S = 5.0
STREAMS = 8  # connections for bulk, where the settings do not say
PASSES = 3  # how often a joiner takes what the run has committed while it took the state


@dataclass(slots=True)
class Offer:
    header: Header
    payload: torch.Tensor
    outer_step: OuterStep
    began: float
    withdrawn: bool = False


@register_transport("hub")
class HubTransport(Transport):
    """One gateway's side. Each open slot has a thread, which says everything again until the hub has answered."""

    passes = PASSES

    def __init__(
        self, island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
    ) -> None:
        self._config = transport
        self._require_address()
        self._patience_s = lighthouse.patience_s
        self._beat_s = lighthouse.heartbeat_interval_s
        self._merge = merge
        self._traffic = Traffic()
        self._offers: dict[int, Offer] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._fault: BaseException | None = None
        self._news = threading.Condition()
        self._joining = threading.RLock()
        self._stop = threading.Event()
        self._left = threading.Event()
        self._waiting: Waiting | None = None
        self._alive = time.monotonic()
        self._step = 0
        self._link: Link | None = None

    def _require_address(self) -> None:
        if not self._config.urls:
            raise UserError(
                "transport.urls is empty: start a hub with `torchtitan-diloco syncer FILE.toml` and give its address "
                '(["http://HOST:PORT"])'
            )

    def _connect(self, hello: Hello) -> Link:
        return HubLink(
            self._config.urls,
            hello.run_id,
            self._member,
            self._config.streams or STREAMS,
            TokenBucket(self._config.max_rate * 1e6 / 8),
        )

    # ---- coming and going ------------------------------------------------------------------------------------------

    def join(self, hello: Hello, state: OuterState) -> Joined:
        self._hello = hello
        self._member = Member(hello.island, hello.incarnation)
        self._step = hello.step
        self._published = state.copy()
        self._link = self._connect(hello)
        sizes = tuple(fragment.numel for fragment in state.fragments)
        # How an island reaches the hub is its own affair.
        settings = {key: value for key, value in hello.settings.items() if not key.startswith("transport.")}
        self._terms = Terms(hello.run_id, settings, sizes, state.hand_over)
        deadline = time.monotonic() + self._patience_s
        self._insist(lambda: self._enter(state, deadline), deadline)
        threading.Thread(target=self._beat, daemon=True, name="hub-beat").start()
        heals: list[Heal] = []
        for _ in range(self.passes):
            taken = self._insist(lambda: self._take(state, whole=True), deadline)
            if not taken.heals:
                break
            heals += taken.heals
        self.publish(state)
        admitted = self._insist(lambda: self._ask("POST", "/admit", {"slot": state.slot}), deadline)
        self._note(None)
        if hello.finished:
            logger.info("the hub holds the run's last state; no island needs this one's")
        return Joined(int(admitted["step"]), tuple(heals), tuple(admitted["present"]))

    def _enter(self, state: OuterState, deadline: float) -> None:
        """Until the hub says that its state is there to be taken, and has this island's, if that is the run's."""
        began = time.time()
        while True:
            reply = self._ask("POST", "/join", self._introduction(state))
            if reply["status"] == "take":
                return
            if reply["status"] == "upload":
                tensors = state.tensors()
                for name, ranges in reply["missing"].items():
                    self._put(f"/state/{name}", tensors[name].view(torch.uint8), ranges)
                continue
            self._note(Waiting(str(reply["why"]), began, "the hub says so"))
            if time.monotonic() > deadline:
                raise Resumable(f"waited {self._patience_s:g} s (lighthouse.patience_s) for {reply['why']}")
            self._pause(RETRY_S)

    def _introduction(self, state: OuterState) -> dict[str, Any]:
        return {
            "started": self._hello.started,
            "terms": self._terms.to_json(),
            "step": self._step,
            "state": state.describe(),
        }

    def _rejoin(self) -> None:
        """The hub does not know this island (any more): it was started anew, or has not heard of it for too long."""
        with self._joining:
            try:
                self._ask("POST", "/beat", self._sign_of_life())
            except Refusal:
                logger.warning("joining the hub again")
                self._enter(self._published, time.monotonic() + self._patience_s)
                self._ask("POST", "/admit", {"slot": self._published.slot})

    def _beat(self) -> None:
        while not self._left.wait(self._beat_s):
            try:
                self._ask("POST", "/beat", self._sign_of_life())
            except (Unreachable, Refusal) as error:
                logger.debug("heartbeat: %s", error)

    def _sign_of_life(self) -> dict[str, Any]:
        idle = max(0.0, time.monotonic() - self._alive)
        return {"step": self._step, "slot": self._published.slot, "idle_s": idle}

    def publish(self, state: OuterState) -> None:
        self._published = state.copy()
        self._live()

    def progress(self, step: int) -> None:
        self._step = step
        self._live()

    def _live(self) -> None:
        self._alive = time.monotonic()

    def stop(self) -> None:
        self._stop.set()

    def leave(self, reason: str) -> None:
        if self._left.is_set():
            return
        self._left.set()
        if self._link is not None:
            try:
                self._ask("POST", "/leave", {"reason": reason})
            except (Unreachable, Refusal) as error:
                logger.debug("no goodbye: %s", error)
            self._link.close()

    # ---- state -----------------------------------------------------------------------------------------------------

    def heal(self, state: OuterState) -> Joined:
        deadline = time.monotonic() + self._patience_s
        taken = self._insist(lambda: self._take(state, whole=False), deadline)
        self.publish(state)
        self._note(None)
        return taken

    def _take(self, state: OuterState, whole: bool) -> Joined:
        """Make ``state`` the hub's (all of it, or the fragments that are further there); only what differs travels."""
        began = time.monotonic()
        offered = self._ask("GET", "/state")
        mine = state.describe()
        description = offered["state"] if whole else combine(mine, offered["state"])
        tensors, received = state.tensors(), 0
        for i, (theirs, ours) in enumerate(zip(description["fragments"], mine["fragments"], strict=True)):
            if theirs == ours:
                continue
            for name in (f"anchor.{i}", f"momentum.{i}"):
                tensors.pop(name, None)
                if name in offered["tensors"]:
                    flat = buffers.empty(state.fragments[i].numel)
                    self._get(f"/state/{offered['key']}/{name}", flat.view(torch.uint8))
                    tensors[name] = flat
                    received += flat.nbytes
        try:
            state.restore(description, tensors)
        except ValueError as error:
            raise Unreachable(f"the hub's state has come damaged: {error}") from error
        version = max(held.version for held in state.states)
        heal = Heal(HUB_SOURCE, received, time.monotonic() - began, version)
        present = tuple(int(i) for i in offered["present"])
        return Joined(int(offered["step"]), (heal,) if received else (), present)

    # ---- slots -----------------------------------------------------------------------------------------------------

    def offer(self, header: Header, payload: torch.Tensor, outer_step: OuterStep) -> None:
        self._live()
        self._traffic.open(header.slot)
        offer = self._offers[header.slot] = Offer(header, payload, outer_step, time.monotonic())
        threading.Thread(target=self._run, args=(offer,), daemon=True, name="hub-slot").start()

    def result(self, slot: int, timeout_s: float) -> Outcome | None:
        self._live()
        with self._news:
            self._news.wait_for(lambda: slot in self._outcomes or self._fault is not None, timeout=timeout_s)
            if self._fault is not None:
                raise self._fault
            return self._outcomes.pop(slot, None)

    def withdraw(self) -> None:
        for offer in list(self._offers.values()):
            offer.withdrawn = True

    def waiting(self) -> Waiting | None:
        return self._waiting

    def _run(self, offer: Offer) -> None:
        """A slot's thread. What ends it early ends the island's training, which would wait for it for ever."""
        try:
            outcome = self._insist(lambda: self._carry(offer), None)
            self._note(None)
            self._finish(offer, outcome)
        except BaseException as error:  # noqa: BLE001 - raised in ``result``
            if self._left.is_set():
                return
            with self._news:
                self._fault = UserError(str(error)) if isinstance(error, Refusal) else error
                self._news.notify_all()

    def _carry(self, offer: Offer) -> Outcome:
        """Say and send what the hub lacks until it has settled the slot. All of it may be done again."""
        slot = offer.header.slot
        reply: dict[str, Any] = {"status": "unknown"}
        since = time.time()
        while True:
            if offer.withdrawn and reply["status"] in ("unknown", "open"):
                reply = self._ask("POST", f"/slots/{slot}/withdraw")
                if reply["status"] == "unknown":
                    reply = {"status": "withdrawn"}
                offer.withdrawn = False
            elif reply["status"] == "unknown":
                reply = self._ask("POST", f"/slots/{slot}/header", offer.header.to_json())
            elif reply["status"] == "open":
                islands = ", ".join(map(str, reply["islands"]))
                target = f"islands {islands}" if islands else "the hub"
                self._note(Waiting(target, since, f"{reply['phase']} of slot {slot}"))
                if reply["missing"]:
                    path = f"/slots/{slot}/payload"
                    self._put(path, offer.payload, reply["missing"], slot, of=offer.payload.nbytes)
                reply = self._ask("GET", f"/slots/{slot}/outcome", wait_s=POLL_S, wait=int(POLL_S))
            else:
                return self._outcome(offer, reply)

    def _outcome(self, offer: Offer, reply: dict[str, Any]) -> Outcome:
        slot = offer.header.slot
        if reply["status"] == "withdrawn":
            return Outcome(slot, "withdrawn", reason="asked to stop")
        if reply["status"] == "behind":
            return Outcome(slot, "behind", reason=str(reply["reason"]))
        record = Record.from_json(reply)
        if record.status == "failed":
            return Outcome(slot, "failed", reason=record.reason, present=record.present)
        payload = buffers.empty(record.nbytes, torch.uint8)
        try:
            self._get(f"/slots/{slot}/result", payload, slot)
        except Refusal as refusal:
            if refusal.kind != "gone":
                raise
            return Outcome(slot, "behind", reason=str(refusal))
        advance = offer.outer_step(self._merge.decode(offer.header.fragment, payload))
        if f"{advance.digest} {advance.merged}" != record.digest:
            return Outcome(slot, "behind", reason="our bits differ from the hub's")
        return Outcome(
            slot,
            "committed",
            advance=advance,
            participants=record.participants,
            weights=record.weights,
            tokens=record.tokens,
            positions=record.positions,
            skipped=record.skipped,
            members=record.members,
            contested=record.contested,
            present=record.present,
        )

    def _finish(self, offer: Offer, outcome: Outcome) -> None:
        sent, received = self._traffic.close(outcome.slot)
        self._offers.pop(outcome.slot, None)
        outcome = replace(
            outcome,
            exchange_s=time.monotonic() - offer.began,
            bytes_sent=sent,
            bytes_received=received,
        )
        with self._news:
            self._outcomes[outcome.slot] = outcome
            self._news.notify_all()

    # ---- requests --------------------------------------------------------------------------------------------------

    def _insist(self, call: Callable[[], T], deadline: float | None) -> T:
        """Do it until it works. deadline: for the hub to be reachable; without one, a slot's thread waits for ever.

        Raises Resumable, or UserError where the hub refuses for good.
        """
        pause, since = RETRY_S, time.time()
        while True:
            self._check()
            try:
                return call()
            except Unreachable as error:
                self._note(Waiting(f"the hub at {self._link.url if self._link else '?'}", since, str(error)))
                if deadline is not None and time.monotonic() > deadline:
                    raise Resumable(
                        f"waited {self._patience_s:g} s (lighthouse.patience_s) for the hub: {error}"
                    ) from error
            except Refusal as refusal:
                if refusal.kind == "refused" or refusal.kind == "malformed":
                    raise UserError(f"the hub refuses island {self._hello.island}: {refusal}") from refusal
                if refusal.kind == "stranger":
                    try:
                        self._rejoin()
                        continue
                    except (Unreachable, Refusal) as error:
                        logger.debug("not in yet: %s", error)
            self._pause(pause)
            pause = min(2 * pause, SLOWEST_RETRY_S)

    def _check(self) -> None:
        if self._left.is_set():
            raise Resumable("this island has left")

    def _pause(self, seconds: float) -> None:
        self._live()
        if self._stop.wait(seconds):
            raise Resumable("stopped while waiting for the hub")

    def _note(self, waiting: Waiting | None) -> None:
        self._waiting = waiting

    def _ask(
        self, method: str, path: str, body: Any = None, wait_s: float = 0.0, **query: int
    ) -> dict[str, Any]:
        assert self._link is not None
        return self._link.ask(method, path, body, wait_s=wait_s, **query)

    def _put(self, path: str, data: torch.Tensor, ranges: Any, slot: int | None = None, **query: int) -> None:
        assert self._link is not None
        moved = lambda size: None if slot is None else self._traffic.add(slot, sent=size)
        self._link.put(path, data, [(int(a), int(b)) for a, b in ranges], moved, **query)

    def _get(self, path: str, into: torch.Tensor, slot: int | None = None) -> None:
        assert self._link is not None
        moved = lambda size: None if slot is None else self._traffic.add(slot, received=size)
        self._link.get(path, into, moved)


HUB_SOURCE = -1
"""In a heal event, in the place of an island's number."""
