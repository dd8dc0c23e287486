"""The island's share of the data: it changes at committed slots, on all ranks at the same inner step; and the ledger.

See ``outer.shares`` for who reads what. All calls are made on all ranks together; outer state and ledger are the gateway's.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torchtitan_diloco.data.ledger import Ledger, ranges
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.outer.shares import share_of
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)


class SampleFeed(Protocol):
    """A data loader that reads streams it is assigned, ``data.loader.CorpusDataLoader`` for example."""

    def holds(self) -> dict[str, str]:
        """The shards this island may read, by source."""
        ...

    def positions(self) -> dict[str, int]:
        """How far each stream is that it reads."""
        ...

    def assign(self, positions: Mapping[str, int]) -> None:
        """Read these streams, from these positions on."""
        ...

    def describe(self) -> dict[str, Any]:
        """Seed and sources, for the ledger."""
        ...


class DataShare:
    """feed: None for a loader without an account of its samples. ledger: on the gateway, where one is kept."""

    def __init__(
        self, feed: SampleFeed | None, ledger: Ledger | None, group: IslandGroup, island: int
    ) -> None:
        self._feed, self._ledger, self._group, self._island = feed, ledger, group, island
        self.guest = False
        self.idle = False
        """There is nothing for this island to read before the next committed slot."""
        self._skipped: dict[str, int] = {}  # up to where streams led to weights that were thrown away
        self._kept = False  # the island's weights stand on this share: it was restored, or read from
        if ledger is not None and feed is not None:
            ledger.begin(feed.describe(), feed.holds())

    # ---- entering --------------------------------------------------------------------------------------------------

    def enter(self, outer: OuterState | None, present: Collection[int], *, healed: bool) -> None:
        """The island is a member of the run, or has looked again where that stands. healed: its state is another island's.

        Where it is not (the slots it had missed had failed), its weights keep what they were trained on, and the share stays.
        """
        if healed and self._ledger is not None:
            self._ledger.drop(f"island {self._island} took the state of another")
        if self._ledger is not None and outer is not None:
            self._ledger.head(outer.lineage, outer.slot, outer.tokens_total, outer.positions)
        if healed or not self._kept or self.idle:
            self._assign(outer, present)
        elif self._feed is not None:
            self.idle = not self._feed.positions()
            self.stepped(outer)
        self._kept = True

    def _assign(self, outer: OuterState | None, present: Collection[int]) -> None:
        if self._feed is None:
            return
        positions: dict[str, int] | None = None
        self._skipped = {}
        if outer is not None:
            share = share_of(self._island, self._feed.holds(), outer.members, outer.turn, present)
            positions = {name: outer.positions.get(name, 0) for name in share.streams}
            self.guest = share.guest
            logger.debug("island %d reads %s", self._island, positions)
        positions = self._group.tell(positions)
        self._feed.assign(positions)
        self.idle = not positions

    # ---- between slots ---------------------------------------------------------------------------------------------

    def header(self, outer: OuterState) -> dict[str, Any]:
        """What a header says of the data."""
        if self._feed is None:
            return {"positions": {}, "skipped": {}, "holds": {}, "guest": False}
        return {
            "positions": {name: end for name, (_, end) in self._read(outer).items()},
            "skipped": self._skipped,
            "holds": self._feed.holds(),
            "guest": self.guest,
        }

    def _read(self, outer: OuterState) -> dict[str, tuple[int, int]]:
        assert self._feed is not None
        return ranges(outer.positions, self._feed.positions())

    def stepped(self, outer: OuterState | None) -> None:
        """An inner step is done: what it was trained on survives a crash of this process."""
        if self._ledger is not None and self._feed is not None and outer is not None:
            self._ledger.read(self._read(outer))

    def discard(self, outer: OuterState | None) -> None:
        """The weights since the last committed slot are not finite and thrown away; the next samples are others."""
        if self._feed is not None and outer is not None:
            self._skipped = {name: end for name, (_, end) in self._read(outer).items()}

    # ---- slots -----------------------------------------------------------------------------------------------------

    def committed(
        self, parent: str, positions: Mapping[str, int], after: OuterState, outcome: Outcome
    ) -> None:
        """On the gateway: write down a committed slot. parent, positions: before it. after: the outer state."""
        if self._ledger is None:
            return
        if self._island in outcome.contested:
            self._ledger.drop(f"island {self._island} read streams that another island had read")
        self._ledger.commit(
            slot=outcome.slot,
            parent=parent,
            lineage=after.lineage,
            tokens_total=after.tokens_total,
            consumed={
                i: ranges({**positions, **outcome.skipped.get(i, {})}, ends)
                for i, ends in outcome.positions.items()
            },
            skipped={i: ranges(positions, ends) for i, ends in outcome.skipped.items()},
            members=outcome.members,
        )

    def settle(self, outer: OuterState | None, outcome: Outcome) -> None:
        """The slot has ended: shards change hands after a commit; after a failure an idle island looks again for some."""
        if outcome.status == "committed" or (outcome.status == "failed" and self.idle):
            self._assign(outer, outcome.present)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"guest": self.guest, "skipped": self._skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave; the feed has its positions from the trainer's own state."""
        self.guest = bool(state["guest"])
        self._skipped = {str(name): int(end) for name, end in state["skipped"].items()}
        self._kept = True
