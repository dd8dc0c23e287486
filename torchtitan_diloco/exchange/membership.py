"""Membership through TorchFT's Lighthouse: who is there, off the training thread, with epochs of our own.

The Lighthouse's quorum ids restart at 1 with it and change only with the set of replicas, so they name nothing here. Each
island carries its incarnation and a counter of renewals in the quorum's data; the epoch is a hash over those of all ready
islands, and therefore the same for everybody who got the same quorum, and new whenever somebody asks for a new one.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.messages import Epoch
from torchtitan_diloco.outer.policy import Member

CONNECT_S = 2.0  # one try to reach the Lighthouse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """An island as its last quorum request described it.

    phase: "joining" (not a member), "due" (nor, and with no patience left to wait for founders), "founder" (its state is
    what others found from), "ready" (a member), "left" (it may come back one day) or "lost" (something broke there, and it
    will be back as soon as it can).
    """

    island: int
    incarnation: str
    run_id: str
    started: float
    phase: str
    renewals: int
    url: str
    store: str
    slot: int
    tokens_total: int

    @property
    def member(self) -> Member:
        return Member(self.island, self.incarnation)


GONE = ("left", "lost")
"""Phases of islands that have said goodbye."""


def newest(peers: list[Peer]) -> list[Peer]:
    """One peer per island, the newest incarnation, in the order of the ids: a dead one may still be listed beside it."""
    best: dict[int, Peer] = {}
    for peer in sorted(peers, key=lambda p: (p.started, p.incarnation)):
        best[peer.island] = peer
    return [best[island] for island in sorted(best)]


def epoch_of(peers: list[Peer]) -> Epoch | None:
    """The membership that this set of peers (as ``newest`` gives it) stands for; None when nobody is ready."""
    ready = [p for p in peers if p.phase == "ready"]
    if not ready:
        return None
    key = json.dumps([[p.island, p.incarnation, p.renewals] for p in ready])
    return Epoch(hashlib.sha256(key.encode()).hexdigest()[:16], tuple(p.member for p in ready))


class Membership:
    """Keeps this island in the Lighthouse's quorum and reports what the quorum says.

    Two threads: one heartbeats, one asks for quorums all the time, since an island that heartbeats without asking blocks
    the others' quorum. ``changed`` is notified at every new view.

    A Lighthouse that is back after a while, or is another one, knows nobody at first. For ``hold_s`` after that a view in
    which members of the last one are missing is not believed, or whoever asks first would go on alone.

    lost_since: since when (epoch seconds) the Lighthouse has not answered a heartbeat; None when it does.
    on_return: called when it answers again, with the seconds it did not, before the view that follows.
    """

    def __init__(
        self,
        address: str,
        me: Peer,
        *,
        heartbeat_interval_s: float,
        quorum_interval_s: float,
        on_change: Callable[[list[Peer]], None],
        hold_s: float = 0.0,
        on_return: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise UserError(
                "transport.kind = gloo needs torchft, which has no wheel for this machine's architecture; "
                "build it from source or choose another transport"
            ) from error
        self._client_class = LighthouseClient
        self.address = address
        self._me = me
        self._heartbeat_interval_s = heartbeat_interval_s
        self._quorum_interval_s = quorum_interval_s
        self._on_change = on_change
        self._hold_s = hold_s
        self._on_return = on_return
        self._was_lost = False  # since the last view
        self._hold_until: float | None = None
        # The last quorum: its number, and who is in it.
        self._quorum: tuple[int, frozenset[str]] = (0, frozenset())
        self._stop = threading.Event()
        self._kick = threading.Event()
        self._changing = threading.Lock()
        self.changed = threading.Condition()
        self.peers: list[Peer] = []
        self.quorums = 0
        self.lost_since: float | None = None
        self._threads = [
            threading.Thread(target=self._heartbeats, daemon=True, name="lighthouse-heartbeat"),
            threading.Thread(target=self._quorums, daemon=True, name="lighthouse-quorum"),
        ]

    def start(self, patience_s: float) -> None:
        """Raises UserError when the Lighthouse cannot be reached within ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._client_class(self.address, connect_timeout=timedelta(seconds=2)).heartbeat(
                    self._replica_id, timeout=timedelta(seconds=2)
                )
                break
            except Exception as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"lighthouse.address = {self.address}: no Lighthouse answers there within {patience_s:g} s; "
                        "start one with `torchtitan-diloco lighthouse` or correct the address"
                    ) from error
                time.sleep(0.5)
        for thread in self._threads:
            thread.start()

    @property
    def _replica_id(self) -> str:
        return f"island_{self._me.island}:{self._me.incarnation}"

    def update(self, **changes: Any) -> None:
        """Change what the next quorum request says of this island."""
        with self._changing:
            self._me = replace(self._me, **changes)
        self._kick.set()

    def renew(self) -> None:
        """Make the next epoch differ from all before."""
        with self._changing:
            self._me = replace(self._me, renewals=self._me.renewals + 1)
        self._kick.set()

    def seen_as(self, phase: str) -> bool:
        """Whether the current view shows this island in ``phase``."""
        return any(p.member == self._me.member and p.phase == phase for p in self.peers)

    def close(self, phase: str = "left", linger_s: float = 2.0) -> None:
        """Show the others, if there are any, that this island is no member any more; then stop. phase: one of ``GONE``.

        A request still waiting for its quorum is not waited for: its thread ends with the process.
        """
        if self._threads[0].is_alive():
            self.update(phase=phase)
            with self.changed:
                self.changed.wait_for(lambda: self.seen_as(phase) or self._is_alone(), timeout=linger_s)
        self._stop.set()
        self._kick.set()

    def _is_alone(self) -> bool:
        return all(p.member == self._me.member or p.phase in GONE for p in self.peers)

    def _heartbeats(self) -> None:
        client = None
        while not self._stop.wait(self._heartbeat_interval_s):
            try:
                client = client or self._client_class(
                    self.address, connect_timeout=timedelta(seconds=CONNECT_S)
                )
                client.heartbeat(self._replica_id, timeout=timedelta(seconds=CONNECT_S))
            except Exception as error:  # noqa: BLE001 - as above
                client = None
                if self.lost_since is None:
                    self.lost_since = time.time()
                    logger.warning("the Lighthouse at %s does not answer: %s", self.address, error)
                continue
            if self.lost_since is not None:
                seconds, self._was_lost = time.time() - self.lost_since, True
                logger.info("the Lighthouse at %s answers again, after %.1f s", self.address, seconds)
                self._on_return(seconds)
                self.lost_since = None

    def _quorums(self) -> None:
        client = None
        while not self._stop.is_set():
            me = self._me
            data = {name: getattr(me, name) for name in Peer.__dataclass_fields__}
            try:
                client = client or self._client_class(self.address, connect_timeout=timedelta(seconds=2))
                quorum = client.quorum(self._replica_id, timedelta(seconds=10), data=data)
            except Exception as error:  # noqa: BLE001 - as above; whether it is away is seen by the heartbeats
                logger.debug("no quorum: %s", error)
                client = None
                self._stop.wait(0.5)
                continue
            peers = [Peer(**dict(p.data)) for p in quorum.participants if p.data]
            replicas = frozenset(p.replica_id for p in quorum.participants)
            if self._is_believed(int(quorum.quorum_id), replicas, peers):
                self._see(peers)
            self._kick.wait(self._quorum_interval_s)
            self._kick.clear()

    def _is_believed(self, number: int, replicas: frozenset[str], peers: list[Peer]) -> bool:
        """Whether nobody is missing in a quorum only because its Lighthouse has not heard of it yet."""
        before, self._quorum = self._quorum, (number, replicas)
        # One that has been there all the time gives every other set of replicas a higher number.
        if self._was_lost or (number <= before[0] and replicas != before[1]):
            self._was_lost, self._hold_until = False, time.monotonic() + self._hold_s
        if self._hold_until is None:
            return True
        here = {p.island for p in peers}
        missing = [p.island for p in self.peers if p.phase not in GONE and p.island not in here]
        if missing and time.monotonic() < self._hold_until:
            return False
        if missing:
            logger.warning("islands %s have not come back to the Lighthouse; going on without them", missing)
        self._hold_until = None
        return True

    def _see(self, peers: list[Peer]) -> None:
        view = newest([p for p in peers if p.run_id == self._me.run_id])
        for stranger in [p for p in peers if p.run_id != self._me.run_id]:
            logger.warning(
                "island %d of another run (%s) asks this Lighthouse", stranger.island, stranger.run_id
            )
        with self.changed:
            self.peers = view
            self.quorums += 1
            self.changed.notify_all()
        self._on_change(view)
