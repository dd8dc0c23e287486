"""How an island enters a run: it founds it with the others, or takes the state of one that is in it.

Nobody trains before this is done, so nobody ever trains on, or contributes, weights that were not agreed on.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import httpx

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.control import PEER_TIMEOUT_S, PeerClient
from torchtitan_diloco.exchange.membership import Membership, Peer
from torchtitan_diloco.exchange.taking import StateTaker
from torchtitan_diloco.exchange.transport import Heal, Hello, Joined, Waiting
from torchtitan_diloco.outer.founding import awaited, may_found
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)

View = list[Peer]
RETRY_S = 0.5
LOOK_S = 0.1  # the others train on meanwhile


def holders(peers: View) -> View:
    """The islands that hold the run's state."""
    return [p for p in peers if p.phase in ("founder", "ready")]


def in_phase(peers: View, *phases: str) -> View:
    return [p for p in peers if p.phase in phases]


def founders(peers: View) -> View:
    """The islands that wait for a run to be founded."""
    return in_phase(peers, "joining", "due")


class Entry:
    """One island's way in. Its calls block; ``stop`` makes them raise Resumable, as does the end of patience.

    A run is founded when all its islands are present, or enough of them once one has no patience left and is "due" (see
    ``outer.founding``), from the one with the longest history (of equals the lowest id): it becomes the "founder", the
    others take its state where theirs differs and become "ready", then so does the founder.
    Whoever comes later takes the state of the furthest member and becomes "ready".

    adopted: called with the state and the step taken from another island. note: called with what is waited for.
    """

    def __init__(
        self,
        hello: Hello,
        membership: Membership,
        patience_s: float,
        stop: threading.Event,
        adopted: Callable[[OuterState, int], None],
        note: Callable[[Waiting | None], None],
    ) -> None:
        self._hello = hello
        self._membership = membership
        self._patience_s = patience_s
        self._stop = stop
        self._adopted = adopted
        self._note = note
        self._deadline = 0.0
        self._taker = StateTaker()
        self._founding = False
        self._overdue = False  # the run is founded by fewer islands than it is to have

    def join(self, state: OuterState) -> Joined:
        """Raises UserError naming the settings in which this island and another differ."""
        self._deadline = time.monotonic() + self._patience_s
        joined: Joined | None = None
        while joined is None:
            joined = self._found() if self._is_founder() else self._take(state, whole=True)
        self._adopted(
            state, joined.step
        )  # from here on it answers for the slots before this state, and for no others
        self._membership.update(phase="ready")
        self._wait("admission", self._is_admitted)
        # The others ask again only when they have taken in the view that shows us: the next quorum proves they have.
        seen = self._membership.quorums
        self._wait("admission", lambda peers: self._membership.quorums > seen)
        if not self._founding:
            joined = self._catch_up(state, joined)
        return self._with_present(joined)

    def _catch_up(self, state: OuterState, joined: Joined) -> Joined:
        """Take what the run has committed meanwhile, and what it is about to commit without this island.

        The others count on it from now on: it would be behind in its first slot, and have trained a window for nothing.
        """
        since = time.time()
        while self._first_slot() > state.slot or any(p.slot > state.slot for p in self._others()):
            later = self._take(state, whole=True)
            if later is None or not later.heals:
                others = tuple(p.island for p in self._others()) or "the others"
                self._pause(Waiting(others, since, "a slot began before this island came"))
            if later is not None:
                joined = Joined(later.step, joined.heals + later.heals)
        self._note(None)
        return replace(joined, step=max(joined.step, self._step_of_others())) if joined.heals else joined

    def _first_slot(self) -> int:
        """The first slot that all others can still take this island into; those that do not answer are on their way out."""
        me, slot = Member(self._hello.island, self._hello.incarnation), 0
        for peer in self._others():
            with suppress(httpx.HTTPError, ValueError, KeyError):
                with PeerClient(peer.url, self._hello.run_id, PEER_TIMEOUT_S) as client:
                    first = client.first_with(me)
                slot = max(slot, sys.maxsize if first is None else first)
        return slot

    def _pause(self, waiting: Waiting) -> None:
        self._note(waiting)
        if self._stop.wait(LOOK_S):
            raise Resumable(f"stopped while waiting for {waiting}")
        if time.monotonic() > self._deadline:
            raise Resumable(f"waited {self._patience_s:g} s (lighthouse.patience_s) for {waiting}")

    def _with_present(self, joined: Joined) -> Joined:
        islands = {p.island for p in holders(self._membership.peers)} | {self._hello.island}
        return replace(joined, present=tuple(sorted(islands)))

    def progress(self) -> str:
        """How far the state that is being taken has come, in words; "" while there is none."""
        return self._taker.progress()

    def heal(self, state: OuterState) -> Joined:
        """Bring ``state`` up to the furthest member's; waits for one to be there."""
        self._deadline = time.monotonic() + self._patience_s
        while True:
            self._wait("an island with the run's state", lambda peers: bool(self._others()))
            joined = self._take(state, whole=False)
            if joined is not None:
                return self._with_present(joined)

    def serve(self, behind: Callable[[], list[int]]) -> Joined:
        """Be a member that has finished, until nobody is ``behind``."""
        self._deadline = time.monotonic() + self._patience_s
        logger.info(
            "this island has finished; it waits, at most %g s (lighthouse.patience_s), for islands that have not",
            self._patience_s,
        )
        self._wait("islands that have not finished", lambda peers: not behind(), lambda peers: behind())
        return Joined(self._hello.step)

    # ---- founding --------------------------------------------------------------------------------------------------

    def _is_founder(self) -> bool:
        """Wait until the run is there, or complete enough to found; whether others found it from this island's state."""
        hello = self._hello
        peers = self._wait(
            awaited(hello.found, hello.num_islands, self._patience_s),
            self._is_decided,
            lambda peers: self._missing(founders(peers)),
            self._press,
        )
        if holders(peers):
            return False
        self._overdue = bool(in_phase(peers, "due"))
        first = max(founders(peers), key=lambda p: (p.tokens_total, p.slot, -p.island))
        if first.island == self._hello.island:
            return True
        # Or until the founder is gone again, and another has to be found.
        self._wait(
            f"island {first.island} to found",
            lambda peers: bool(holders(peers)) or all(p.member != first.member for p in peers),
            lambda peers: [first.island],
        )
        return False

    def _is_decided(self, peers: View) -> bool:
        """Whether the run is there, or can be founded by those who are."""
        hello, present = self._hello, len(founders(peers))
        overdue = bool(in_phase(peers, "due"))
        return bool(holders(peers)) or may_found(hello.found, hello.num_islands, present, overdue)

    def _press(self, peers: View) -> bool:
        """Patience is over: have the run founded by those who are here, if they are enough for that."""
        hello, present = self._hello, len(founders(peers))
        if self._membership.seen_as("due") or not may_found(hello.found, hello.num_islands, present, True):
            return False
        logger.warning("founding the run without all of its islands (semi_sync.found = %s)", hello.found)
        self._deadline = time.monotonic() + self._patience_s
        self._membership.update(phase="due")
        return True

    def _all_are_in(self, peers: View) -> bool:
        """On the founder: whether those with whom it founds the run have its state."""
        hello, ready = self._hello, len(in_phase(peers, "ready"))
        if ready >= hello.num_islands - 1:
            return True
        return (
            self._overdue
            and not founders(peers)
            and may_found(hello.found, hello.num_islands, ready + 1, True)
        )

    def _found(self) -> Joined | None:
        """Be the founder; None when another island was lost in the middle of it."""
        others = [p for p in self._membership.peers if p.island != self._hello.island]
        try:
            for peer in others:
                self._check_settings(peer)
        except httpx.HTTPError as error:
            logger.warning("an island was lost while founding: %s", error)
            time.sleep(RETRY_S)
            return None
        self._membership.update(phase="founder")
        self._wait(
            "the other founders", self._all_are_in, lambda peers: self._missing(in_phase(peers, "ready"))
        )
        return Joined(self._hello.step)

    def _is_admitted(self, peers: View) -> bool:
        return not in_phase(peers, "founder") and self._membership.seen_as("ready")

    def _missing(self, here: View) -> list[int]:
        """Of the founding islands."""
        present = {p.island for p in here} | {self._hello.island}
        return [island for island in range(self._hello.num_islands) if island not in present]

    def _wait(
        self,
        what: str,
        ready: Callable[[View], bool],
        whom: Callable[[View], list[int]] = lambda peers: [],
        press: Callable[[View], bool] = lambda peers: False,
    ) -> View:
        """Wait until the membership view satisfies ``ready``. whom: the islands that it depends on, where these are known.

        press: at the end of patience; whether there is more of it.
        """
        since = time.time()
        membership = self._membership
        while True:
            with membership.changed:
                membership.changed.wait_for(lambda: ready(membership.peers), timeout=RETRY_S)
                peers = membership.peers
            if ready(peers):
                self._note(None)
                return peers
            why = f"islands present: {', '.join(str(p.island) for p in peers) or 'none'}"
            if membership.lost_since is not None:
                why += f"; lighthouse.address = {membership.address} does not answer"
            islands = tuple(whom(peers))
            self._note(
                Waiting(islands, since, f"{why}; for {what}") if islands else Waiting(what, since, why)
            )
            if self._stop.is_set():
                raise Resumable(f"stopped while waiting for {what}")
            if time.monotonic() > self._deadline and not press(peers):
                raise Resumable(f"waited {self._patience_s:g} s (lighthouse.patience_s) for {what}; {why}")

    # ---- state of others -------------------------------------------------------------------------------------------

    def _others(self) -> View:
        return [p for p in holders(self._membership.peers) if p.island != self._hello.island]

    def _take(self, state: OuterState, *, whole: bool) -> Joined | None:
        """Take the state of the furthest member; None when it could not be had this time."""
        source = max(self._others(), key=lambda p: (p.tokens_total, p.slot, -p.island), default=None)
        if source is None:
            return None
        self._founding = source.phase == "founder"  # then all begin at its step
        try:
            self._check_settings(source)
            return self._copy(state, source, whole)
        except (httpx.HTTPError, Unreachable, ValueError) as error:
            logger.warning("the state of island %d could not be taken: %s", source.island, error)
            if self._stop.is_set() or time.monotonic() > self._deadline:
                raise Resumable(f"no state to be had from island {source.island}: {error}") from error
            time.sleep(RETRY_S)
            return None

    def _step_of_others(self) -> int:
        """Where in run progress they are by now: an island that starts behind them makes them wait at its first slot."""
        step = 0
        for peer in self._others():
            with (
                suppress(httpx.HTTPError),
                PeerClient(peer.url, self._hello.run_id, PEER_TIMEOUT_S) as client,
            ):
                step = max(step, int(client.state()["step"]))
        return step

    def _copy(self, state: OuterState, source: Peer, whole: bool) -> Joined:
        """Make ``state`` the source's (all of it, or the fragments that are further there); only what differs travels."""
        began = time.monotonic()
        self._note(Waiting((source.island,), time.time(), f"its state, from {source.url}"))
        with PeerClient(source.url, self._hello.run_id, PEER_TIMEOUT_S) as client:
            offered = client.state()
            received = self._taker.take(state, offered, partial(client.fetch, offered["key"]), whole)
        self._taker.done()
        self._note(None)
        step = int(offered["step"])
        self._adopted(state, step)
        heal = Heal(source.island, received, time.monotonic() - began, max(s.version for s in state.states))
        return Joined(step, (heal,) if received else ())

    def _check_settings(self, peer: Peer) -> None:
        with PeerClient(peer.url, self._hello.run_id, PEER_TIMEOUT_S) as client:
            theirs = client.settings()
        mine = self._hello.settings
        keys = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        if keys:
            shown = "; ".join(f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in keys)
            raise UserError(f"island {self._hello.island} and island {peer.island} must agree on {shown}")
