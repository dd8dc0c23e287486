"""The islands that train in lock step: who is there, and that all of them hold the same.

Islands that come, or come back, take parameters, optimizer state and account from the one that is furthest. These are
broadcast, rank by rank, over the connections that carry the gradients: layouts are equal, everybody waits for the joiner
anyway, and nothing need be served, unpickled or kept ready.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.lockstep import Lockstep
from torchtitan_diloco.exchange.transport import Waiting
from torchtitan_diloco.island.replica import Replica
from torchtitan_diloco.outer.account import Account
from torchtitan_diloco.outer.meeting import Record, Verdict, meet
from torchtitan_diloco.semi_sync.method import Setup
from torchtitan_diloco.semi_sync.waiting import REPORT_S, report

logger = logging.getLogger(__name__)

PAUSE_S = 0.2
LINGER_S = 60.0  # how long a finished island stays for one that was lost and may be back soon


class Assembly:
    """One rank's view of it; every call is made on all ranks of the island together.

    settings: what must be equal on all islands. account: this island's, overwritten where it takes another's state.
    settle: called whenever the islands of a group have become equal, with whether this one took another's state.
    """

    def __init__(
        self,
        setup: Setup,
        link: Lockstep,
        replica: Replica,
        account: Account,
        settings: Mapping[str, Any],
        settle: Callable[[bool], None],
    ) -> None:
        self.link = link
        self.members: dict[int, Mapping[str, str]] = {}
        """The islands that are here, with the shards they hold."""
        self._setup, self._group, self._replica = setup, setup.group, replica
        self._account, self._settings, self._settle = account, settings, settle
        self._member = False  # it has been part of a group that trains
        self._settled = False  # the present group is equal
        self._known: set[int] = set()

    def align(self) -> None:
        """Wait for a quorum whose islands are all equal.

        Raises UserError when this island does not fit, Resumable when it is asked to stop or patience runs out.
        """
        began, reported, since = time.monotonic(), time.monotonic(), time.time()
        while True:
            asked = self.link.ask(self._account.step)
            if not self._group.any(not asked or self.link.is_new or not self._settled):
                return
            awaited = "a quorum" if self._group.any(not asked) else self._meet()
            if self._group.any(self._setup.drain.is_set()):
                raise Resumable(f"stopped while waiting for {awaited or 'the other islands'}")
            if awaited is None:
                continue
            if self._group.any(time.monotonic() - began > self.link.patience_s):
                raise Resumable(f"waited {self.link.patience_s:g} s (lighthouse.patience_s) for {awaited}")
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                self._report(awaited, since)
            time.sleep(PAUSE_S)

    def break_up(self, reason: str) -> None:
        """The step was not made: all islands have to meet before the next attempt."""
        logger.warning("step %d is made again: %s", self._account.step + 1, reason)
        self._settled = False

    def linger(self) -> None:
        """At the end of the run, stay for an island that has been lost: only here can it find the last state."""
        if lost := self._known - self.members.keys():
            logger.info(
                "this island has finished; it waits, at most %g s, for islands %s, which have not and can take the final "
                "state only from one that has",
                LINGER_S,
                sorted(lost),
            )
        self._stay(self._known, LINGER_S)

    def help_others_finish(self) -> None:
        """Long after that, come back for islands that have not finished."""
        logger.info(
            "this island has finished; it waits, at most %g s (lighthouse.patience_s), for islands that have not",
            self.link.patience_s,
        )
        self._member = True  # the last state needs no agreement on who founds the run
        self._stay(set(range(self._setup.config.num_islands)), self.link.patience_s)

    def _stay(self, expected: set[int], limit_s: float) -> None:
        deadline, reported, since = time.monotonic() + limit_s, time.monotonic(), time.time()
        try:
            while self._group.any(bool(lost := expected - self.members.keys())):
                if self._group.any(self._setup.drain.is_set() or time.monotonic() > deadline):
                    raise Resumable(f"islands {sorted(lost)} have not come within {limit_s:g} s")
                if time.monotonic() - reported >= REPORT_S:
                    reported = time.monotonic()
                    self._report(tuple(sorted(lost)), since)
                time.sleep(PAUSE_S)
                self.align()
        except (Resumable, UserError) as stopped:
            logger.warning("not waiting any longer for islands that have not finished: %s", stopped)

    def _report(self, awaited: str | tuple[int, ...], since: float) -> None:
        present = ", ".join(map(str, sorted(self.members))) or "none"
        why = f"step {self._account.step + 1}; islands present: {present}"
        if self._group.is_gateway:
            report(self._setup.trace, Waiting(awaited, since, why))

    # ---- meeting ---------------------------------------------------------------------------------------------------

    def _meet(self) -> str | None:
        """Compare with the islands of the group, and make all of them equal. None when they are; else what is missing."""
        self._settled = False
        verdict = self._group.tell(self._call() if self._group.is_gateway else None)
        if isinstance(verdict, str):
            return self._give_up(verdict)
        me = [record.incarnation for record in verdict.records].index(self._setup.incarnation)
        self.members = {r.island: r.holds for i, r in enumerate(verdict.records) if i not in verdict.refused}
        if me in verdict.refused:
            raise UserError(verdict.refused[me])
        if verdict.refused:
            return f"island {verdict.records[min(verdict.refused)].island}, which does not fit, to leave"
        if not verdict.complete:
            return f"{self._setup.config.num_islands} islands"
        problem = ""
        try:
            self.link.connect()
        except RuntimeError as error:
            problem = str(error)
        if self._group.any(bool(problem)) or (verdict.behind and not self._heal(verdict, me)):
            return self._give_up(problem or "a connection was lost")
        if not self.link.commit():  # it also ends what a failure has begun: quorums that are new each time
            return "the other islands"
        self._member = self._settled = True
        self._known |= self.members.keys()
        self._settle(me in verdict.behind)
        logger.info("islands %s train in step, from step %d on", sorted(self.members), self._account.step)
        return None

    def _call(self) -> Verdict | str:
        """On the gateway: what all records amount to, or why there are none."""
        try:
            self.link.connect()  # the other ranks' turn is when it is known that each has a counterpart
            records = self.link.gather(json.dumps(self._record().to_json()).encode())
            return meet([Record.from_json(json.loads(r)) for r in records], self._setup.config.num_islands)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            return str(error).partition("\n")[0]

    def _record(self) -> Record:
        setup = self._setup
        return Record(
            island=setup.island,
            incarnation=setup.incarnation,
            started=setup.started,
            run_id=setup.run_id,
            member=self._member,
            settings=self._settings,
            holds=setup.feed.holds() if setup.feed else {},
            moments=self._replica.has_moments,
            account=self._account,
        )

    def _give_up(self, reason: str) -> str:
        """The group is of no use: hang up, and have the next quorum be another."""
        logger.warning("the group for step %d broke: %s", self._account.step + 1, reason)
        self.link.fail(reason)
        self.link.commit()
        return "the other islands"

    @torch.no_grad()
    def _heal(self, verdict: Verdict, me: int) -> bool:
        """Whoever is behind takes the source's state, all of it or nothing. False when it could not be sent."""
        source = verdict.records[verdict.source]
        behind, had_moments = me in verdict.behind, self._replica.has_moments
        began, taken, broken = time.monotonic(), [], False
        for tensor in self._replica.tensors(moments=source.moments):
            # Complete before anything is overwritten. Whoever is neither source nor behind receives as well, and drops it.
            buffer = tensor.to("cpu", copy=me != verdict.source).contiguous()
            try:
                self.link.broadcast(buffer.reshape(-1).view(torch.uint8), verdict.source)
            except RuntimeError as error:
                logger.warning("the state of island %d was not sent: %s", source.island, error)
                broken = True
                break
            if behind:
                taken.append((tensor, buffer))
        if self._group.any(broken):
            if not had_moments:
                self._replica.drop_moments()
            return False
        if behind:
            self._take(source, taken, began)
        return True

    def _take(self, source: Record, taken: Sequence[tuple[torch.Tensor, torch.Tensor]], began: float) -> None:
        for tensor, buffer in taken:
            tensor.copy_(buffer)
        if not source.moments:
            self._replica.drop_moments()
        self._replica.reshard()
        self._account.take(source.account)
        size = sum(self._group.collect(sum(buffer.nbytes for _, buffer in taken)))
        self._setup.trace.step = step = self._account.step
        self._setup.trace.event(
            "heal", source=source.island, bytes=size, seconds=time.monotonic() - began, version=step
        )
