"""The common sequence of slots: which fragment slot k exchanges, and after which inner step it is due."""

from dataclasses import dataclass


def own_steps(steps: int, sync_every: int, own: int | None) -> int:
    """Inner steps of an island with ``own`` steps a window (None: as the run) in a run of ``steps`` steps of progress."""
    return -(-steps * (own or sync_every) // sync_every)


@dataclass(frozen=True, slots=True)
class SlotClock:
    """Slots of a run of ``steps`` steps of progress in which each of ``fragments`` fragments is sent every ``sync_every``.

    Slot k exchanges fragment ``k mod fragments`` and is due once ``(k + 1) * sync_every / fragments`` steps of run progress
    are done (Streaming DiLoCo, arXiv 2501.18512: fragments take turns, evenly spread over the window).
    Every attempt uses up its slot, whether it commits or fails, so the number is a function of progress alone and islands
    never disagree on what is sent.

    An island may have ``own`` inner steps in place of ``sync_every``. It counts its own steps, and is sent to and from run
    progress here alone: at each slot the two meet exactly, between slots progress is interpolated and rounded down, so
    neither direction ever passes a slot. With ``own`` = ``sync_every`` both are the same number.
    """

    sync_every: int
    steps: int
    fragments: int = 1
    own: int | None = None

    def __post_init__(self) -> None:
        for every in (self.sync_every, self._own):
            if not 1 <= self.fragments <= every:
                raise ValueError(f"fragments must lie in 1..sync_every, got {self.fragments} of {every}")

    @property
    def slots(self) -> int:
        """Slots of the whole run. At its end one for every fragment is due, so that no training is left out of the anchor."""
        return self._regular + self.fragments

    @property
    def last_step(self) -> int:
        """The island's own step at which the run ends."""
        return own_steps(self.steps, self.sync_every, self.own)

    def reached(self, step: int) -> int:
        """How many slots are due by the time the island has done ``step`` inner steps of its own."""
        return self._reached(step, self._own, self.last_step)

    def due(self, slot: int) -> int:
        """The island's own step at which a slot is due."""
        return self._due(slot, self._own, self.last_step)

    def progress(self, step: int) -> int:
        """Run progress once the island has done ``step`` inner steps of its own."""
        return self._between(step, (self._own, self.last_step), (self.sync_every, self.steps))

    def own_step(self, progress: int) -> int:
        """The island's own step at ``progress``."""
        return self._between(progress, (self.sync_every, self.steps), (self._own, self.last_step))

    def fragment_of(self, slot: int) -> int:
        return slot % self.fragments

    @property
    def _own(self) -> int:
        return self.own or self.sync_every

    @property
    def _regular(self) -> int:
        """Slots that are due before the run's last step."""
        return (self.steps - 1) * self.fragments // self.sync_every

    def _reached(self, step: int, every: int, last: int) -> int:
        return self.slots if step >= last else min(step * self.fragments // every, self._regular)

    def _due(self, slot: int, every: int, last: int) -> int:
        if slot >= self._regular:
            return last
        return min(last, -(-(slot + 1) * every // self.fragments))

    def _between(self, step: int, here: tuple[int, int], there: tuple[int, int]) -> int:
        """``step`` of one count in another; each is given by its steps a window and its last step."""
        if step >= here[1]:
            return there[1]
        slot = self._reached(step, *here)
        begin, end = self._due(slot - 1, *here), self._due(slot, *here)
        first, last = self._due(slot - 1, *there), self._due(slot, *there)
        return first + (step - begin) * (last - first) // (end - begin)
