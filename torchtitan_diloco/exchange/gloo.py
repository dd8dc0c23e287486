"""Transport for islands that reach one another: Lighthouse membership, HTTP control path, bulk over gloo."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from torchtitan_diloco.address import advertised
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.attempt import Abandon, Bulk, Effect, Finished, Renew, Send
from torchtitan_diloco.exchange.bulk import GlooBulk
from torchtitan_diloco.exchange.control import PEER_TIMEOUT_S, ControlServer, Outbox
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.entry import Entry
from torchtitan_diloco.exchange.membership import CONNECT_S, Membership, Peer, epoch_of
from torchtitan_diloco.exchange.messages import Epoch, Message, Outcome
from torchtitan_diloco.exchange.protocol import SlotProtocol
from torchtitan_diloco.exchange.pulse import Pulse
from torchtitan_diloco.exchange.traffic import Traffic
from torchtitan_diloco.exchange.transport import Hello, Joined, Transport, Waiting, register_transport
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState, OuterStep

logger = logging.getLogger(__name__)

TICK_S = 1.0  # what may have been lost is said again this often
LINGER_S = 60.0  # how long a finished island stays for one that was lost and may be back soon
SETTLE_S = 10.0  # how long an island that gives up waits for the outcome of a slot that it has confirmed
REACH_S = 10.0  # how long the Lighthouse may take to answer at the start


@register_transport("gloo")
class GlooTransport(Transport):
    """One gateway's side. All protocol work happens in one thread; the training thread only posts and polls."""

    def __init__(
        self, island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
    ) -> None:
        if not lighthouse.address:
            raise UserError(
                "lighthouse.address is empty: start one with `torchtitan-diloco lighthouse` and give its address "
                '(http://HOST:PORT), or set semi_sync.method = "none" to train one island alone'
            )
        self._lighthouse = lighthouse
        self._port = island.port
        self._host = advertised(island.advertise, lighthouse.address)
        self._merge = merge
        self._traffic = Traffic()
        # Before the others can count this island as gone; they do so that long after a heartbeat it may have sent before.
        noticed_s = max(
            lighthouse.heartbeat_timeout_s - 2 * lighthouse.heartbeat_interval_s,
            lighthouse.heartbeat_timeout_s / 2,
        )
        self._pulse = Pulse(noticed_s, self._stood_still)
        self._bulk = GlooBulk(
            self._host,
            transport.exchange_timeout_s,
            transport.max_rate * 1e6 / 8,
            self._traffic,
            transport.streams or 1,
            self._pulse.stopped,
        )
        self._events: queue.SimpleQueue[Callable[[], list[Effect]]] = queue.SimpleQueue()
        self._outcomes: dict[int, Outcome] = {}
        self._fault: BaseException | None = None
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._epoch: Epoch | None = None
        self._waiting: Waiting | None = None
        self._offered: dict[int, float] = {}
        self._left = False
        self._gave_up: float | None = None
        self._cut_off = False
        self._away = ""  # why the others may have gone on without this island
        self._slot = 0
        self._known: set[int] = set()  # islands that have been members
        self._departed: set[int] = set()  # those of them that have said goodbye
        self._server: ControlServer | None = None
        self._members: Membership | None = None

    def join(self, hello: Hello, state: OuterState) -> Joined:
        self._hello = hello
        self._me = Member(hello.island, hello.incarnation)
        self._protocol = SlotProtocol(self._me, self._merge)
        self._server = ControlServer(
            self._host, self._port, hello.run_id, hello.settings, self._deliver, self._first_with
        )
        self._server.step = hello.step
        self._server.publish(state)
        self._outbox = Outbox(self._me, hello.run_id, PEER_TIMEOUT_S)
        # The final state needs no agreement on who founds the run, and is served from the first moment on.
        phase = "ready" if hello.finished else "joining"
        self._members = Membership(
            self._lighthouse.address,
            Peer(
                hello.island, hello.incarnation, hello.run_id, hello.started, phase, 0,
                self._server.url, self._bulk.address, state.slot, state.tokens_total,
            ),
            heartbeat_interval_s=self._lighthouse.heartbeat_interval_s,
            quorum_interval_s=self._lighthouse.quorum_interval_s,
            on_change=self._see,
            hold_s=self._lighthouse.heartbeat_timeout_s + CONNECT_S,
            on_return=self._lighthouse_is_back,
        )  # fmt: skip
        self._members.start(REACH_S)
        threading.Thread(target=self._run, daemon=True, name="exchange").start()
        self._pulse.start()

        self._entry = Entry(
            hello, self._members, self._lighthouse.patience_s, self._stop, self._adopted, self._note
        )
        if hello.finished:
            self.publish(state)
            everybody = set(range(hello.num_islands))
            return self._entry.serve(lambda: self._behind(everybody))
        return self._entry.join(state)

    def heal(self, state: OuterState) -> Joined:
        return self._entry.heal(state)

    def _adopted(self, state: OuterState, step: int) -> None:
        self.progress(step)
        self.publish(state)

    def _note(self, waiting: Waiting | None) -> None:
        self._waiting = waiting

    def progress(self, step: int) -> None:
        assert self._server is not None
        self._server.step = step

    def publish(self, state: OuterState) -> None:
        assert self._server is not None and self._members is not None
        self._slot = state.slot
        self._server.publish(state)
        self._members.update(slot=state.slot, tokens_total=state.tokens_total)
        self._events.put(partial(self._protocol.skip_to, state.slot))

    # ---- slots -----------------------------------------------------------------------------------------------------

    def offer(self, header: Header, payload: torch.Tensor, outer_step: OuterStep) -> None:
        self._offered[header.slot] = time.monotonic()
        self._traffic.open(header.slot)
        self._events.put(partial(self._protocol.offer, header, payload, outer_step))

    def result(self, slot: int, timeout_s: float) -> Outcome | None:
        self._require_lighthouse()
        gave_up = self._gave_up is not None and time.monotonic() - self._gave_up > SETTLE_S
        if gave_up and slot not in self._outcomes:
            # To the others this island is one that crashed here; when it is back it learns what has become of it.
            return Outcome(slot, "withdrawn", reason="without a Lighthouse its outcome cannot be known")
        with self._news:
            self._news.wait_for(lambda: slot in self._outcomes or self._fault is not None, timeout=timeout_s)
            if self._fault is not None:
                raise RuntimeError(f"the exchange thread has ended: {self._fault}") from self._fault
            return self._outcomes.pop(slot, None)

    def _require_lighthouse(self) -> None:
        """Raises Resumable, once, when the Lighthouse has been away for as long as this island has patience.

        Until then slots go on among those who were members; but nobody can come back, and nobody's death is seen.
        """
        lost_since = self._members.lost_since if self._members is not None else None
        patience_s = self._lighthouse.patience_s
        if lost_since is None or self._gave_up is not None or time.time() - lost_since < patience_s:
            return
        self._gave_up = time.monotonic()
        raise Resumable(
            f"lighthouse.address = {self._lighthouse.address}: no Lighthouse has answered there for {patience_s:g} s "
            "(lighthouse.patience_s); start one there, then this island again"
        )

    def _finished(self, outcome: Outcome) -> None:
        sent, received = self._traffic.close(outcome.slot)
        outcome = replace(
            outcome,
            exchange_s=time.monotonic() - self._offered.pop(outcome.slot),
            bytes_sent=sent,
            bytes_received=received,
        )
        with self._news:
            self._outcomes[outcome.slot] = outcome
            self._news.notify_all()

    def withdraw(self) -> None:
        self._events.put(self._protocol.withdraw)

    def waiting(self) -> Waiting | None:
        if (waiting := self._waiting) is None:
            return None
        return waiting.more(self._traffic.progress(waiting.slot) or self._entry.progress())

    def _deliver(self, sender: Member, message: Message) -> None:
        self._events.put(partial(self._receive, sender, message))

    def _first_with(self, member: Member) -> Future[int]:
        """Answered in turn: a membership that has come before is taken in."""
        answer: Future[int] = Future()

        def look() -> list[Effect]:
            if answer.set_running_or_notify_cancel():
                answer.set_result(self._protocol.first_with(member))
            return []

        self._events.put(look)
        return answer

    def _receive(self, sender: Member, message: Message) -> list[Effect]:
        return self._protocol.receive(sender, message)

    def _lighthouse_is_back(self, seconds: float) -> None:
        assert self._members is not None
        if seconds >= self._lighthouse.heartbeat_timeout_s:
            self._cut_off = True
            self._members.renew()  # if it was this island that was away, the epoch before is not to come again

    def _see(self, peers: list[Peer]) -> None:
        if self._cut_off:
            self._cut_off = False
            if any(p.phase == "ready" and p.slot > self._slot for p in peers):
                self._interrupt("this island was cut off, and the others have gone on")
        self._known |= {p.island for p in peers if p.phase == "ready"}
        present = {p.island: p.phase == "left" for p in peers}
        self._departed = {i for i in self._departed if present.get(i, True)} | {
            i for i, left in present.items() if left
        }
        epoch = epoch_of(peers)
        if epoch is not None and (self._epoch is None or epoch.id != self._epoch.id):
            self._epoch = epoch
            logger.info("membership %s: islands %s", epoch.id, list(epoch.islands()))
            self._events.put(partial(self._protocol.enter, epoch))

    def _run(self) -> None:
        """The exchange thread. What ends it early ends the island's training, which would wait for it for ever."""
        try:
            self._exchange()
        except BaseException as error:
            logger.exception("the exchange has ended")
            with self._news:
                self._fault = error
                self._news.notify_all()

    def _exchange(self) -> None:
        """Feed the protocol, and carry out what it says."""
        due = time.monotonic() + TICK_S
        while not self._left:
            try:
                event = self._events.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                event, due = self._protocol.tick, time.monotonic() + TICK_S
            self._notice_absence()
            for effect in event():
                self._perform(effect)
            event = effect = None  # type: ignore[assignment]  # they hold payloads, and the next may take a second
            self._note_waiting()

    def _stood_still(self, seconds: float) -> None:
        self._interrupt(f"this island stood still for {seconds:.1f} s")

    def _interrupt(self, why: str) -> None:
        """The others have gone on without this island: what it was sending is of no use, and comes in their way."""
        logger.warning("%s; what it was exchanging is given up", why)
        self._bulk.interrupt()
        self._away = why
        self._events.put(list)

    def _notice_absence(self) -> None:
        """Before anything else, as what has come meanwhile may be about what the others have given up."""
        while self._pulse.stopped():  # its thread is about to say so
            time.sleep(0.01)
        if self._away:
            why, self._away = self._away, ""
            for effect in self._protocol.lost_touch(why):
                self._perform(effect)

    def _note_waiting(self) -> None:
        waited = self._protocol.waiting_for()
        if waited is None:
            return
        offer, islands = waited
        target = tuple(islands) or "membership"
        before = self._waiting
        since = (
            before.since if before and (before.target, before.slot) == (target, offer.slot) else time.time()
        )
        self._waiting = Waiting(target, since, f"{offer.phase.value} of slot {offer.slot}", offer.slot)
        self._waiting = self._waiting.more(self._addresses(islands))

    def _addresses(self, islands: Collection[int]) -> str:
        """Where these are dialled."""
        assert self._members is not None
        return ", ".join(f"island {p.island} is {p.url}" for p in self._members.peers if p.island in islands)

    def _perform(self, effect: Effect) -> None:
        assert self._members is not None
        if isinstance(effect, Send):
            url = next((p.url for p in self._members.peers if p.member == effect.to), None)
            if url is not None:
                self._outbox.send(effect.to, url, effect.message)
        elif isinstance(effect, Bulk):
            self._traffic.expect(effect.attempt[0], sum(effect.traffic(self._me)))
            threading.Thread(target=self._carry, args=(effect,), daemon=True, name="bulk").start()
        elif isinstance(effect, Abandon):
            # Its thread ends before its next message, or with its connections; what it brings is ignored.
            self._bulk.abandon(effect.attempt)
        elif isinstance(effect, Renew):
            self._members.renew()
        elif isinstance(effect, Finished):
            self._waiting = None
            self._bulk.settled(effect.outcome.slot)
            if effect.outcome.status in ("failed", "withdrawn"):
                self._bulk.failed(effect.outcome.slot)
            self._finished(effect.outcome)

    def _carry(self, bulk: Bulk) -> None:
        """One stage of an attempt's bulk, in a thread of its own: a frozen peer blocks gloo for its whole time-out."""
        assert self._members is not None
        slot = bulk.attempt[0]
        try:
            first = bulk.members[0]
            store = next((p.store for p in self._members.peers if p.member == first), None)
            if store is None:
                raise RuntimeError(f"island {first.island} is gone")
            payloads = self._bulk.exchange(self._me, bulk, store)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("bulk of slot %d failed: %s", slot, reason)
            self._events.put(partial(self._protocol.bulk_failed, bulk.attempt, reason))
        else:
            self._events.put(partial(self._protocol.bulk_done, bulk.attempt, payloads))

    # ---- end -------------------------------------------------------------------------------------------------------

    def _linger(self) -> None:
        """At the end of the run, stay for an island that has just been lost: it can only finish with this state."""
        assert self._members is not None
        deadline, began = time.monotonic() + LINGER_S, time.time()
        said = False
        while time.monotonic() < deadline and not self._stop.is_set():
            if not (behind := self._behind(self._known)):
                return
            if not said:
                said = True
                logger.info(
                    "this island has finished; it waits, at most %g s, for islands %s, which have not and can take the "
                    "final state only from one that has",
                    LINGER_S,
                    behind,
                )
            self._note(Waiting(tuple(behind), began, "they have not finished"))
            time.sleep(0.1)

    def _behind(self, expected: set[int]) -> list[int]:
        """Islands that are not there or have not got as far as this one, and have not said that they go."""
        assert self._members is not None
        view = {p.island: p for p in self._members.peers if p.phase != "lost"}
        lost = expected - self._departed - view.keys()
        late = {i for i, p in view.items() if p.phase != "left" and p.slot < self._slot}
        return sorted(lost | late)

    def stop(self) -> None:
        self._stop.set()

    def leave(self, reason: str) -> None:
        if self._left:
            return
        if self._members is not None:
            self._outbox.flush(PEER_TIMEOUT_S)
            if reason == "done":
                self._linger()
            self._members.close("lost" if reason == "failure" else "left")
        self._left = True
        self._pulse.stop()
        if self._server is not None:
            self._outbox.close()
            self._server.close()
        self._bulk.close()
