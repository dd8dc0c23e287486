"""After a hub was started anew: what was committed and its state lacks, and the islands that were there."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_diloco.hub.store import Found
from torchtitan_diloco.outer.history import have_parted, outranks
from torchtitan_diloco.outer.state import OuterState

RETURN_S = (
    15.0  # beyond the lease: for how long slots wait for islands that were there when the hub went down
)


class Recovery:
    """Of what an earlier hub has left; without that, there is nothing to wait for."""

    def __init__(self, now: Callable[[], float], wait_s: float, return_s: float) -> None:
        """wait_s: for islands that may hold later state. return_s: for the others before slots go on without them."""
        self._now = now
        self._state_until, self._back_until = now() + wait_s, now() + return_s
        self._lacking: dict[int, str] = {}  # fragment -> digest of the version that was committed last
        self._awaited: set[int] = set()
        self._returning: set[int] = set()

    def begin(self, found: Found) -> None:
        """The found state moves past slots that failed."""
        state = found.state
        for record in found.records:
            if record.slot < state.slot:
                continue
            if record.status == "committed":
                self._lacking[record.slot % len(state.states)] = record.digest.partition(" ")[0]
            elif not self._lacking:
                state.fail(record.slot)
        self._awaited, self._returning = set(found.members), set(found.members)

    def lacks(self, state: OuterState) -> bool:
        """Whether something was committed that this state does not hold."""
        return any(state.states[i].digest != digest for i, digest in self._lacking.items())

    def awaits(self, state: OuterState, island: int) -> list[int]:
        """An island is there and holds nothing later than ``state``: those who still may. Empty once there is no hope."""
        self._awaited.discard(island)
        if not self.lacks(state) or self._now() > self._state_until:
            self.end()
        return sorted(self._awaited)

    def end(self) -> None:
        self._lacking, self._awaited = {}, set()

    @property
    def returning(self) -> set[int]:
        """Islands that slots wait for although they have not been admitted again."""
        if self._now() > self._back_until:
            self._returning = set()
        return self._returning

    def back(self, island: int) -> bool:
        """It is there again, or gone for good; whether it was waited for."""
        known = island in self.returning
        self._returning.discard(island)
        return known


def later(state: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Of two descriptions: whether the first holds something committed that is longer history than what the second holds.

    What islands begin with is no history, whichever seed it is from. Of two that have parted, one is later as a whole.
    """
    if have_parted(state, than):
        return outranks(state, than)
    pairs = zip(state["fragments"], than["fragments"], strict=True)
    return any(
        a["version"] > 0 and (a["tokens"], a["version"]) > (b["tokens"], b["version"]) for a, b in pairs
    )
