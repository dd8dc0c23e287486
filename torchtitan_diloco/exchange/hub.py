"""Transport for islands that cannot reach one another: every one dials out to the hub, which decides, merges and keeps."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.doubt import Doubt, goodbye
from torchtitan_diloco.exchange.hub_link import HubLink, Link
from torchtitan_diloco.exchange.hub_words import HUB_SOURCE, Offer, Taken
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.exchange.taking import StateTaker
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
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.founding import may_found
from torchtitan_diloco.outer.outcome import Settlement
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState, OuterStep

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 2.0  # for how long one question for an outcome waits at the hub
RETRY_S = 0.1
ASK_AGAIN_S = 0.5  # while the hub has nothing new
SLOWEST_RETRY_S = 5.0
STREAMS = 8  # connections for bulk, where the settings do not say
PASSES = 3  # how often a joiner takes what the run has committed while it took the state


@register_transport("hub")
class HubTransport(Transport):
    """One gateway's side. Each open slot has a thread, which says everything again until the hub has answered."""

    passes = PASSES
    withdraw_s = 5.0  # see Doubt

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
        self._joined = False
        self._overdue = False  # patience is over, and the rule for founding allows fewer islands
        self._state = StateTaker()
        self._doubt = Doubt(self.withdraw_s)

    def _require_address(self) -> None:
        if not self._config.urls:
            raise UserError(
                "transport.urls is empty: start a hub with `torchtitan-diloco syncer FILE.toml` and give its address "
                '(["http://HOST:PORT"])'
            )

    def _connect(self, hello: Hello) -> Link:
        pace = TokenBucket(self._config.max_rate * 1e6 / 8)
        return HubLink(self._config, hello.run_id, self._member, self._config.streams or STREAMS, pace)

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
        threading.Thread(target=self._beat, daemon=True, name="hub-beat").start()
        self._insist(lambda: self._enter(state, deadline), deadline)
        taken: list[Taken] = []
        while len(taken) < self.passes and (not taken or taken[-1].joined.heals):
            taken.append(self._insist(lambda: self._take(state, whole=True), deadline))
        admitted = self._insist(lambda: self._ask("POST", "/admit", {"slot": state.slot}), deadline)
        self._joined = True
        # From now on others wait for this island. What is under way without it is over before it offers anything.
        while self.passes > 1:
            taken.append(self._insist(lambda: self._take(state, whole=True), deadline))
            if taken[-1].settled:
                self._insist(lambda: self._ask("POST", "/admit", {"slot": state.slot}), deadline)
                break
            self._note(Waiting("the others", time.time(), "a slot began before this island came"))
            self._pause(ASK_AGAIN_S)
        self._state.done()
        self._note(None)
        if hello.finished:
            logger.info("the hub holds the run's last state; no island needs this one's")
        heals = [heal for each in taken for heal in each.joined.heals]
        whole = Heal(
            HUB_SOURCE, sum(h.bytes for h in heals), sum(h.seconds for h in heals), taken[-1].version
        )
        return Joined(int(admitted["step"]), (whole,) if heals else (), taken[-1].joined.present)

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
                    path = reply.get("at", {}).get(name) or f"/state/{name}"
                    self._put(path, tensors[name].view(torch.uint8), ranges)
                continue
            self._note(Waiting(str(reply["why"]), began, "the hub says so"))
            if time.monotonic() > deadline:
                if not self._can_press(reply.get("founders")):
                    raise Resumable(
                        f"waited {self._patience_s:g} s (lighthouse.patience_s) for {reply['why']}"
                    )
                self._overdue, deadline = True, time.monotonic() + self._patience_s
                continue
            self._pause(ASK_AGAIN_S)

    def _can_press(self, founders: int | None) -> bool:
        """Whether the hub, told that patience is over, may found the run with those who are there (by files it does not say).

        Once only.
        """
        hello = self._hello
        present = hello.num_islands if founders is None else founders
        fewer = hello.found != "wait_all" and may_found(hello.found, hello.num_islands, present, True)
        return fewer and not self._overdue

    def _introduction(self, state: OuterState) -> dict[str, Any]:
        return {
            "started": self._hello.started,
            "terms": self._terms.to_json(),
            "step": self._step,
            "state": state.describe(),
            "overdue": self._overdue,
        }

    def _rejoin(self) -> None:
        """The hub does not know this island (any more): it was started anew, or has not heard of it for too long."""
        with self._joining:
            with contextlib.suppress(Refusal):
                if self._sign_of_life()["member"]:
                    return
            logger.warning("joining the hub again")
            self._enter(self._published, time.monotonic() + self._patience_s)
            if self._joined:
                self._ask("POST", "/admit", {"slot": self._published.slot})
            self._note(None)

    def _beat(self) -> None:
        """Not only while slots are open: others wait for this island from the moment on that the hub knows it again."""
        while not self._left.wait(self._beat_s):
            try:
                self._sign_of_life()
            except (Unreachable, UserError) as error:
                logger.debug("heartbeat: %s", error)
            except Refusal as refusal:
                logger.debug("heartbeat: %s", refusal)
                if self._joined and refusal.kind == "stranger":
                    # Whatever stands in the way is raised where somebody waits for an outcome.
                    with contextlib.suppress(Unreachable, Refusal, Resumable):
                        self._rejoin()

    def _sign_of_life(self) -> dict[str, Any]:
        assert self._link is not None
        idle = max(0.0, time.monotonic() - self._alive)
        return self._link.beat({"step": self._step, "slot": self._published.slot, "idle_s": idle})

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
            goodbye(lambda: self._ask("POST", "/leave", {"reason": reason}), f"the hub at {self._link.url}")
            self._link.close()

    # ---- state -----------------------------------------------------------------------------------------------------

    def heal(self, state: OuterState) -> Joined:
        deadline = time.monotonic() + self._patience_s
        taken = self._insist(lambda: self._take(state, whole=False), deadline)
        self._insist(lambda: self._ask("POST", "/admit", {"slot": state.slot}), deadline)
        self._state.done()
        self._note(None)
        return taken.joined

    def _take(self, state: OuterState, whole: bool) -> Taken:
        """Make ``state`` the hub's: all of it, or the fragments that are further there. Raises Unreachable or Refusal."""
        began = time.monotonic()
        self._note(Waiting(f"the hub at {self._url}", time.time(), "its state"))
        offered = self._ask("GET", "/state")
        places = offered.get("at", {})
        get = lambda name, to: self._get(places.get(name) or f"/state/{offered['key']}/{name}", to)
        try:
            received = self._state.take(state, offered, get, whole)
        except ValueError as error:
            raise Unreachable(f"the hub's state has come damaged: {error}") from error
        self.publish(state)
        version = max(held.version for held in state.states)
        heal = Heal(HUB_SOURCE, received, time.monotonic() - began, version)
        present = tuple(int(i) for i in offered["present"])
        joined = Joined(int(offered["step"]), (heal,) if received else (), present)
        return Taken(joined, bool(offered["settled"]), version)

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
            return self._outcomes.pop(slot, None) or self._doubt.give_up(slot, self._waiting)

    def withdraw(self) -> None:
        self._doubt.begin()
        for offer in list(self._offers.values()):
            offer.withdrawn = True

    def waiting(self) -> Waiting | None:
        if (waiting := self._waiting) is None:
            return None
        return waiting.more(self._traffic.progress(waiting.slot) or self._state.progress())

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
                target = tuple(int(i) for i in reply["islands"]) or "the hub"
                why = f"{reply['phase']} of slot {slot}, through the hub at {self._url}"
                self._note(Waiting(target, since, why, slot))
                if reply["missing"]:
                    self._traffic.expect(slot, sum(stop - start for start, stop in reply["missing"]))
                    path = reply.get("at") or f"/slots/{slot}/payload"
                    try:
                        self._put(path, offer.payload, reply["missing"], slot, of=offer.payload.nbytes)
                    except Refusal as refusal:
                        if (
                            refusal.kind != "gone"
                        ):  # all of it has come by another way, or the slot is settled
                            raise
                reply = self._ask("GET", f"/slots/{slot}/outcome", wait_s=POLL_S, wait=int(POLL_S))
            else:
                return self._outcome(offer, reply)

    def _outcome(self, offer: Offer, reply: dict[str, Any]) -> Outcome:
        slot = offer.header.slot
        if reply["status"] == "withdrawn":
            return Outcome(slot, "withdrawn", reason="asked to stop")
        if reply["status"] == "behind":
            return Outcome(slot, "behind", reason=str(reply["reason"]))
        place = reply.pop("at", "")
        record = Record.from_json(reply)
        if record.status == "failed":
            return Outcome(slot, "failed", reason=record.reason, present=record.present)
        offer.merged = offer.merged or Upload(record.nbytes)
        self._traffic.expect(slot, sum(stop - start for start, stop in offer.merged.missing()))
        try:
            self._get(place or f"/slots/{slot}/result", offer.merged, slot)
        except Refusal as refusal:
            if refusal.kind != "gone":
                raise
            return Outcome(slot, "behind", reason=str(refusal))
        advance = offer.outer_step(self._merge.decode(offer.header.fragment, offer.merged.data))
        if f"{advance.digest} {advance.merged}" != record.digest:
            return Outcome(slot, "behind", reason="our bits differ from the hub's")
        common = {f.name: getattr(record, f.name) for f in fields(Settlement)}
        return Outcome(**common, advance=advance)

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
                self._note(Waiting(f"the hub at {self._url}", since, str(error)))
                if deadline is not None and time.monotonic() > deadline:
                    raise Resumable(
                        f"waited {self._patience_s:g} s (lighthouse.patience_s) for the hub: {error}"
                    ) from error
            except Refusal as refusal:
                self._require_hope(refusal)
                if refusal.kind == "stranger":
                    try:
                        self._rejoin()
                        continue
                    except Refusal as error:
                        self._require_hope(error)
                        logger.debug("not in yet: %s", error)
                    except Unreachable as error:
                        logger.debug("not in yet: %s", error)
            self._pause(pause)
            pause = min(2 * pause, SLOWEST_RETRY_S)

    def _require_hope(self, refusal: Refusal) -> None:
        """Raises UserError where the hub would say the same for ever."""
        island = self._hello.island
        if refusal.kind == "forbidden":
            has = self._config.token_file or "which is empty"
            raise UserError(
                f"transport.token_file ({has}): the hub does not let island {island} in: {refusal}; give the file with the "
                f"token that syncer.tokens has for island-{island}"
            ) from refusal
        if refusal.kind in ("refused", "malformed"):
            raise UserError(f"the hub refuses island {island}: {refusal}") from refusal

    def _check(self) -> None:
        if self._left.is_set():
            raise Resumable("this island has left")

    def _pause(self, seconds: float) -> None:
        self._live()
        if self._stop.wait(seconds):
            raise Resumable("stopped while waiting for the hub")

    @property
    def _url(self) -> str:
        return self._link.url if self._link else "?"

    def _note(self, waiting: Waiting | None) -> None:
        self._waiting = waiting

    def _ask(
        self, method: str, path: str, body: Any = None, wait_s: float = 0.0, **query: int
    ) -> dict[str, Any]:
        assert self._link is not None
        return self._link.ask(method, path, body, wait_s=wait_s, **query)

    def _put(self, path: str, data: torch.Tensor, ranges: Any, slot: int | None = None, **query: int) -> None:
        assert self._link is not None
        self._link.put(path, data, [(int(a), int(b)) for a, b in ranges], self._moved(slot, "sent"), **query)

    def _get(self, path: str, into: Upload, slot: int | None = None) -> None:
        assert self._link is not None
        self._link.get(path, into, self._moved(slot, "received"))

    def _moved(self, slot: int | None, which: Literal["sent", "received"]) -> Callable[[int], None]:
        """Counts bytes of a slot; of a state they are signs of life."""

        def moved(size: int) -> None:
            if slot is None:
                self._live()
            else:
                self._traffic.add(slot, **{which: size})

        return moved
