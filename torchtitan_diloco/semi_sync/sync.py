"""Method ``sync``: gradients are averaged over the islands in every inner step, the baseline of all other methods.

HSDP whose replicas are islands, as TorchTitan has it with TorchFT (``experiments.torchft``): FSDP reduces inside an island,
its all-reduce hook over the islands. All islands hold the same parameters and the same optimizer state, bit for bit.

A step: quorum -> forward and backward, averaging -> vote -> clipping, optimizer. Only a step that all have voted for is made.
Whoever cannot know how a vote ended (a member died in it) does not make it. The next quorum then has another number, at which
all islands meet (see ``assembly``), and whoever is behind takes the state of the one that is furthest.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.island.replica import combine
from torchtitan_diloco.outer.account import Account
from torchtitan_diloco.outer.shares import expand, share_of, stream
from torchtitan_diloco.outer.slots import SlotClock
from torchtitan_diloco.semi_sync.assembly import Assembly
from torchtitan_diloco.semi_sync.method import Discarded, SemiSync, Setup, register_semi_sync

logger = logging.getLogger(__name__)


@register_semi_sync("sync")
class GradientSync(SemiSync):
    """Per-step gradient averaging. In the trace, ``semi_sync.sync_every`` steps are one slot."""

    def __init__(self, setup: Setup) -> None:
        assert setup.replica is not None and setup.make_lockstep is not None
        self.setup, self.group, self.replica = setup, setup.group, setup.replica
        self.clock = SlotClock(setup.config.sync_every, setup.steps)
        self.account = Account()  # the same on all ranks
        self.assembly: Assembly | None = None
        self.aligned = False  # the quorum of the next step is there; all islands ask for each of them once
        self.hooked = False  # FSDP averages the gradients, in the backward pass
        self.backwards = 0
        self.streams: list[str] = []  # of all members, in the order of the ballot
        self.elected: dict[str, int] = {}  # the positions that the last vote has settled
        self.stall_s = 0.0

    # ---- entering --------------------------------------------------------------------------------------------------

    def join(self, step: int) -> int:
        setup = self.setup
        finished = step >= setup.steps
        if finished and setup.config.num_islands == 1:
            return step
        assert step == self.account.step, "the account is that of the checkpoint which the trainer has loaded"
        if step == 0:
            self.account.origin = combine(self.group.collect(self.replica.digest()))
        layouts = json.dumps(self.group.collect(self.replica.layout()))
        settings = {
            **setup.settings,
            "ranks": self.group.size,
            "the ranks' shards": hashlib.sha256(layouts.encode()).hexdigest()[:16],
        }
        if setup.ledger is not None and setup.feed is not None:
            setup.ledger.begin(setup.feed.describe(), setup.feed.holds())
        assert setup.make_lockstep is not None
        try:
            link = setup.make_lockstep(self.group)
        except UserError as error:
            if not finished:
                raise
            logger.warning("this island has finished and leaves the others to themselves: %s", error)
            return step
        self.hooked = self.replica.hook(link.average)
        self.assembly = Assembly(setup, link, self.replica, self.account, settings, self._settle)
        if finished:
            self.assembly.help_others_finish()
            return step
        self.assembly.align()
        self.aligned = True
        setup.trace.step = self.account.step
        setup.trace.event("join", slot=self.account.slot)
        return self.account.step

    def _settle(self, healed: bool) -> None:
        """The islands that are here are equal: share out the data, and begin to write down what becomes of it."""
        holds = self.members.values()
        self.streams = sorted(
            {stream(s, k) for h in holds for s, ranges in h.items() for k in expand(ranges)}
        )
        self._assign()
        ledger, account = self.setup.ledger, self.account
        if ledger is not None:
            if healed:
                ledger.drop(f"island {self.setup.island} took the state of another")
            ledger.head(account.lineage, account.step, account.tokens_total, account.positions)

    @property
    def members(self) -> Mapping[int, Mapping[str, str]]:
        return self.assembly.members if self.assembly else {}

    # ---- data ------------------------------------------------------------------------------------------------------

    def _share(self, island: int, holds: Mapping[str, str]) -> tuple[str, ...]:
        """The streams an island reads in this slot: those who are here share out all of them."""
        return share_of(island, holds, self.members, self.account.slot, self.members.keys()).streams

    def _assign(self) -> None:
        """Read this island's share, from where the last step ended."""
        feed, island = self.setup.feed, self.setup.island
        if feed is None:
            return
        share = self._share(island, feed.holds())
        if not share:
            raise UserError(
                f"data.shards: none is left for island {island} to read; cut the sources into more of them"
            )
        feed.assign({name: self.account.positions.get(name, 0) for name in share})

    # ---- inner steps -----------------------------------------------------------------------------------------------

    def inner_step(self, step: int, train: Callable[[int], None]) -> int:
        assert self.assembly is not None
        while True:
            began = time.monotonic()
            try:
                if not self.aligned:
                    self.assembly.align()
            except Resumable as stopped:
                if not self.setup.drain.is_set():
                    self.setup.drain.request(str(stopped))
                return self.account.step
            self.aligned = False
            self.stall_s += time.monotonic() - began
            if self.account.step >= self.setup.steps:  # by another island, while this one had lost touch
                return self.account.step
            self.backwards = 0
            try:
                train(self.account.step + 1)
                return self.account.step + 1
            except Discarded as reason:
                self.assembly.break_up(str(reason))
                self.replica.forget_routing()
                self._assign()

    @torch.no_grad()
    def after_backward(self) -> None:
        assert self.assembly is not None
        self.backwards += 1
        if self.backwards < self.replica.backwards:
            return
        if not self.hooked:
            self.replica.average_gradients(self.assembly.link.average)
        self.replica.average_routing(self.assembly.link.average)
        began = time.monotonic()
        self._elect()
        self.stall_s += time.monotonic() - began

    def _ballot(self) -> torch.Tensor:
        """[key of the history, its negative, how far each stream is], -1 for a stream that this island does not read.

        The maxima of the first two are opposite only where all islands have the same history.
        """
        key = int(self.account.identity[:14], 16)
        read = self.setup.feed.positions() if self.setup.feed else {}
        return torch.tensor([key, -key, *(read.get(name, -1) for name in self.streams)], dtype=torch.int64)

    def _elect(self) -> None:
        """Raises Discarded unless all islands have this step's gradients, averaged, and on top of the same parameters."""
        assert self.assembly is not None
        link, reason = self.assembly.link, ""
        if self.group.any(link.errored):
            reason = "gradients could not be averaged"
        else:
            try:
                high, low, *positions = link.vote(self._ballot()).tolist()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
            else:
                self.elected = {n: p for n, p in zip(self.streams, positions, strict=True) if p >= 0}
                if high != -low:
                    reason = "the islands do not hold the same parameters"
        if reason:
            link.fail(reason)
        if not link.commit():
            raise Discarded(reason or "the vote failed on another rank")

    def after_inner_step(self, step: int, tokens: int) -> int:
        assert self.assembly is not None
        if step > self.account.step:
            self._account_for(step, tokens)
            if step >= self.setup.steps:
                self._see_the_others_finish()
        return step

    def _account_for(self, step: int, tokens: int) -> None:
        account, ledger = self.account, self.setup.ledger
        parent, before = account.lineage, dict(account.positions)
        account.made(step, self.members.keys(), tokens, self.elected)
        if ledger is not None:
            read = {name: (before.get(name, 0), end) for name, end in self.elected.items()}
            consumed = {
                island: {
                    n: read[n] for n in self._share(island, holds) if n in read and read[n][0] < read[n][1]
                }
                for island, holds in self.members.items()
            }
            ledger.commit(
                slot=step - 1,
                parent=parent,
                lineage=account.lineage,
                tokens_total=account.tokens_total,
                consumed=consumed,
                skipped={},
                members=self.members,
            )
        if account.slot < self.clock.reached(step):
            self._close_slot()

    def _close_slot(self) -> None:
        """Sum up the steps since the last slot; all islands do so after the same step."""
        assert self.assembly is not None
        began, account, cost = time.monotonic(), self.account, self.assembly.link.cost
        digest = combine(self.group.collect(self.replica.digest()))
        ranks = self.group.collect((cost.sent, cost.seconds))
        sent, exchange_s = sum(sent for sent, _ in ranks), max(seconds for _, seconds in ranks)
        self.setup.trace.event(
            "round",
            round=account.slot,
            fragment=0,
            version=account.step,
            method=self.setup.config.method,
            participants=list(account.weights()),
            weights=list(account.weights().values()),
            tokens=account.tokens,
            bytes_sent=sent,
            bytes_received=sent,
            exchange_s=exchange_s,
            stall_s=self.stall_s + exchange_s + time.monotonic() - began,
            committed=True,
            digest=digest,
        )
        cost.sent, cost.seconds, self.stall_s = 0, 0.0, 0.0
        account.close_slot(self.clock.reached(account.step), digest)
        self._assign()

    # ---- end, and checkpoints --------------------------------------------------------------------------------------

    def _see_the_others_finish(self) -> None:
        """An island that could not know how the last vote ended can take the last state only from one that has it."""
        assert self.assembly is not None
        try:
            self.assembly.align()
        except Resumable:  # asked to stop: this island is done
            return

    def leave(self, reason: str) -> None:
        if self.assembly is None:
            return
        if reason == "done":
            self.assembly.linger()
        self.assembly.link.close()
        self.assembly = None
        self.setup.trace.event("leave", reason=reason)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return (self.account.to_json(), {}) if self.group.is_gateway else ({}, {})

    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if "origin" not in description:
            raise ValueError("it belongs to another semi_sync.method")
        self.account.take(Account.from_json(description))
