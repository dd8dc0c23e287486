"""Transport for islands that reach one another: Lighthouse membership, HTTP control path, bulk over gloo."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import httpx
import torch

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.bulk import GlooBulk
from torchtitan_diloco.exchange.control import ControlServer, Outbox, PeerClient
from torchtitan_diloco.exchange.membership import Membership, Peer, epoch_of
from torchtitan_diloco.exchange.messages import Epoch, Member, Message, Outcome
from torchtitan_diloco.exchange.protocol import Abandon, Bulk, Effect, Finished, Merge, Renew, Send, SlotProtocol
from torchtitan_diloco.exchange.transport import Heal, Hello, Joined, Transport, Waiting, register_transport
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)

TICK_S = 1.0  # what may have been lost is said again this often
PEER_TIMEOUT_S = 10.0  # one HTTP request to a peer
REACH_S = 10.0  # how long the Lighthouse may take to answer at the start


def route_to(address: str) -> str:
    """The local address from which ``address`` (a URL) is reached; no packet is sent."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    if not parts.hostname or not parts.port:
        raise UserError(f"lighthouse.address = {address}: write it as http://HOST:PORT")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"lighthouse.address = {address}: {parts.hostname} cannot be reached ({error})") from error


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
        self._host = island.advertise or route_to(lighthouse.address)
        self._merge = merge
        self._bulk = GlooBulk(self._host, transport.exchange_timeout_s)
        self._events: queue.SimpleQueue[Callable[[], list[Effect]]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._epoch: Epoch | None = None
        self._waiting: Waiting | None = None
        self._offered = 0.0
        self._traffic = 0
        self._left = False
        self._server: ControlServer | None = None
        self._members: Membership | None = None

    # ---- joining ---------------------------------------------------------------------------------------------------

    def join(self, hello: Hello, state: OuterState) -> Joined:
        self._hello = hello
        self._me = Member(hello.island, hello.incarnation)
        self._protocol = SlotProtocol(self._me, self._merge)
        self._server = ControlServer(self._host, self._port, hello.run_id, hello.settings, self._deliver)
        self._server.step = hello.step
        self._server.publish(state)
        self._outbox = Outbox(self._me, hello.run_id, PEER_TIMEOUT_S)
        self._members = Membership(
            self._lighthouse.address,
            Peer(
                hello.island, hello.incarnation, hello.run_id, hello.started, "joining", 0,
                self._server.url, self._bulk.address, state.slot, state.tokens_total,
            ),
            heartbeat_interval_s=self._lighthouse.heartbeat_interval_s,
            quorum_interval_s=self._lighthouse.quorum_interval_s,
            on_change=self._see,
        )  # fmt: skip
        self._members.start(REACH_S)
        threading.Thread(target=self._run, daemon=True, name="exchange").start()

        deadline = time.monotonic() + self._lighthouse.patience_s
        heals: list[Heal] = []
        step = hello.step
        if self._founder(deadline):
            self._check_settings([p for p in self._members.peers if p.island != self._me.island])
            self._members.update(phase="founder")
            self._wait("the other founders", deadline, lambda peers: len(self._in(peers, "ready")) == hello.num_islands - 1)
        else:
            source = self._source()
            self._check_settings([source])
            step, taken = self._adopt(state, source)
            heals += taken
        self._members.update(phase="ready")
        self._wait("admission", deadline, self._admitted)
        while any(p.slot > state.slot for p in self._others()):  # the run has moved on while this island healed
            step, taken = self._adopt(state, self._source())
            heals += taken
        return Joined(step, tuple(heals))

    def _founder(self, deadline: float) -> bool:
        """Wait until the run is there or complete enough to found; whether this island's state is the one to found from.

        The run is founded when all its islands are present: from the one with the longest history, of equals from the
        lowest id.
        """
        assert self._members is not None
        hello = self._hello

        def decided(peers: list[Peer]) -> bool:
            return any(p.phase in ("founder", "ready") for p in peers) or (
                len(self._in(peers, "joining")) >= hello.num_islands
            )

        peers = self._wait(f"{hello.num_islands} islands", deadline, decided)
        if any(p.phase in ("founder", "ready") for p in peers):
            return False
        first = max(self._in(peers, "joining"), key=lambda p: (p.tokens_total, p.slot, -p.island))
        if first.member == self._me:
            return True
        self._wait(
            f"island {first.island} to found", deadline,
            lambda peers: any(p.phase in ("founder", "ready") for p in peers),
        )  # fmt: skip
        return False

    @staticmethod
    def _in(peers: list[Peer], phase: str) -> list[Peer]:
        return [p for p in peers if p.phase == phase]

    def _admitted(self, peers: list[Peer]) -> bool:
        founder = any(p.phase == "founder" for p in peers)
        return not founder and any(p.member == self._me and p.phase == "ready" for p in peers)

    def _wait(self, what: str, deadline: float, ready: Callable[[list[Peer]], bool]) -> list[Peer]:
        """Wait for the membership view to satisfy ``ready``. Raises Resumable when patience ends or a stop is asked for."""
        assert self._members is not None
        since = time.time()
        while True:
            with self._members.changed:
                self._members.changed.wait_for(lambda: ready(self._members.peers), timeout=0.5)  # type: ignore[union-attr]
                peers = self._members.peers
            if ready(peers):
                self._waiting = None
                return peers
            present = ", ".join(str(p.island) for p in peers) or "none"
            why = f"islands present: {present}"
            if self._members.lost_since is not None:
                why += f"; the Lighthouse at {self._lighthouse.address} does not answer"
            self._waiting = Waiting(what, since, why)
            if self._stop.is_set():
                raise Resumable(f"stopped while waiting for {what}")
            if time.monotonic() > deadline:
                raise Resumable(
                    f"waited {self._lighthouse.patience_s:g} s (lighthouse.patience_s) for {what}; {why}"
                )

    def _others(self) -> list[Peer]:
        """The other islands that hold the run's state."""
        assert self._members is not None
        return [p for p in self._members.peers if p.phase in ("founder", "ready") and p.member != self._me]

    def _source(self) -> Peer:
        """The one of them that is furthest."""
        if not self._others():
            raise Resumable("no other island holds the run's state any more")
        return max(self._others(), key=lambda p: (p.tokens_total, p.slot, -p.island))

    def _check_settings(self, peers: list[Peer]) -> None:
        """Raises UserError naming the settings in which this island differs from a peer."""
        for peer in peers:
            with PeerClient(peer.url, self._hello.run_id, PEER_TIMEOUT_S) as client:
                theirs = client.settings()
            mine = self._hello.settings
            keys = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
            if keys:
                shown = "; ".join(f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in keys)
                raise UserError(f"island {self._hello.island} and island {peer.island} must agree on {shown}")

    # ---- state from others -----------------------------------------------------------------------------------------

    def _adopt(self, state: OuterState, source: Peer) -> tuple[int, list[Heal]]:
        """Make ``state`` the source's, taking over the wire only what differs. Returns the source's step."""
        deadline = time.monotonic() + self._lighthouse.patience_s
        while True:
            try:
                return self._take(state, source)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                logger.warning("taking state from island %d failed: %s", source.island, error)
                if self._stop.is_set() or time.monotonic() > deadline:
                    raise Resumable(f"no state to be had from island {source.island}: {error}") from error
                time.sleep(0.5)
                source = self._source()

    def _take(self, state: OuterState, source: Peer) -> tuple[int, list[Heal]]:
        began = time.monotonic()
        with PeerClient(source.url, self._hello.run_id, PEER_TIMEOUT_S) as client:
            offered = client.state()
            description, mine = offered["state"], state.describe()
            if description["fragments"] == mine["fragments"] and description["lineage"] == mine["lineage"]:
                tensors, received = state.tensors(), 0
            else:
                tensors, received = {}, 0
                for name in offered["tensors"]:
                    tensors[name], size = client.tensor(offered["key"], name)
                    received += size
        state.restore(description, tensors)
        assert self._members is not None and self._server is not None
        self._members.update(slot=state.slot, tokens_total=state.tokens_total)
        self._server.step = int(offered["step"])
        self._server.publish(state)
        seconds = time.monotonic() - began
        heals = [Heal(source.island, received, seconds, state.states[0].version)] if received else []
        return int(offered["step"]), heals

    def heal(self, state: OuterState) -> Joined:
        step, heals = self._adopt(state, self._source())
        return Joined(step, tuple(heals))

    def progress(self, step: int) -> None:
        assert self._server is not None
        self._server.step = step

    def publish(self, state: OuterState) -> None:
        assert self._server is not None and self._members is not None
        self._server.publish(state)
        self._members.update(slot=state.slot, tokens_total=state.tokens_total)

    # ---- slots -----------------------------------------------------------------------------------------------------

    def offer(self, header: Header, payload: torch.Tensor) -> None:
        self._offered = time.monotonic()
        self._traffic = 0
        self._events.put(partial(self._protocol.offer, header, payload))

    def result(self, timeout_s: float) -> Outcome | None:
        try:
            outcome = self._outcomes.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return replace(
            outcome,
            exchange_s=time.monotonic() - self._offered,
            bytes_sent=self._traffic,
            bytes_received=self._traffic,
        )

    def withdraw(self) -> None:
        self._events.put(self._protocol.withdraw)

    def waiting(self) -> Waiting | None:
        return self._waiting

    def _deliver(self, sender: Member, message: Message) -> None:
        self._events.put(partial(self._receive, sender, message))

    def _receive(self, sender: Member, message: Message) -> list[Effect]:
        return self._protocol.receive(sender, message)

    def _see(self, peers: list[Peer]) -> None:
        epoch = epoch_of(peers)
        if epoch is not None and (self._epoch is None or epoch.id != self._epoch.id):
            self._epoch = epoch
            logger.info("membership %s: islands %s", epoch.id, list(epoch.islands()))
            self._events.put(partial(self._protocol.enter, epoch))

    def _run(self) -> None:
        """The exchange thread: feeds the protocol and carries out what it says."""
        due = time.monotonic() + TICK_S
        while not self._left:
            try:
                event = self._events.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                event, due = self._protocol.tick, time.monotonic() + TICK_S
            for effect in event():
                self._perform(effect)
            self._note_waiting()

    def _note_waiting(self) -> None:
        offer = self._protocol.current
        if offer is None:
            return
        islands = self._protocol.waiting_for()
        target = "islands " + ", ".join(map(str, islands)) if islands else "membership"
        since = self._waiting.since if self._waiting and self._waiting.target == target else time.time()
        self._waiting = Waiting(target, since, f"{offer.phase.value} of slot {offer.slot}")

    def _perform(self, effect: Effect) -> None:
        assert self._members is not None
        if isinstance(effect, Send):
            url = next((p.url for p in self._members.peers if p.member == effect.to), None)
            if url is not None:
                self._outbox.send(effect.to, url, effect.message)
        elif isinstance(effect, Bulk):
            threading.Thread(target=self._gather, args=(effect,), daemon=True, name="bulk").start()
        elif isinstance(effect, Abandon):
            self._bulk.forget()
        elif isinstance(effect, Renew):
            self._members.renew()
        elif isinstance(effect, Finished):
            self._waiting = None
            self._outcomes.put(effect.outcome)

    def _gather(self, bulk: Bulk) -> None:
        """One attempt's bulk, in a thread of its own: a frozen peer blocks gloo for its whole time-out."""
        assert self._members is not None
        slot, epoch = bulk.attempt
        try:
            first = bulk.members[0]
            store = next((p.store for p in self._members.peers if p.member == first), None)
            if store is None:
                raise RuntimeError(f"island {first.island} is gone")
            payloads = self._bulk.gather(self._me, epoch, slot, bulk.members, store, bulk.payload)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("bulk of slot %d failed: %s", slot, reason)
            self._events.put(partial(self._protocol.bulk_failed, bulk.attempt, reason))
        else:
            self._traffic += bulk.payload.nbytes * (len(bulk.members) - 1)
            self._events.put(partial(self._protocol.bulk_done, bulk.attempt, payloads))

    # ---- end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._stop.set()

    def leave(self, reason: str) -> None:
        if self._left:
            return
        if self._members is not None:
            self._outbox.flush(PEER_TIMEOUT_S)
            self._members.close()
        self._left = True
        if self._server is not None:
            self._outbox.close()
            self._server.close()
        self._bulk.forget()
