"""The common sequence of slots: which fragment slot k exchanges, and at which step of run progress it is due."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotClock:
    """Slots of a run of ``steps`` inner steps in which each of ``fragments`` fragments is sent every ``sync_every``.

    Slot k exchanges fragment ``k mod fragments`` and is due once ``(k + 1) * sync_every / fragments`` inner steps of run
    progress are done (Streaming DiLoCo, arXiv 2501.18512: fragments take turns, evenly spread over the window).
    Every attempt uses up its slot, whether it commits or fails, so the number is a function of progress alone and islands
    never disagree on what is sent.
    """

    sync_every: int
    steps: int
    fragments: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(
                f"fragments must lie in 1..sync_every, got {self.fragments} of {self.sync_every}"
            )

    def reached(self, step: int) -> int:
        """How many slots are due by the time ``step`` inner steps of run progress are done.

        At the last step one slot for every fragment is, so that no training is left out of the anchor.
        """
        if step >= self.steps:
            return (self.steps - 1) * self.fragments // self.sync_every + self.fragments
        return step * self.fragments // self.sync_every

    def due(self, slot: int) -> int:
        """The step at which a slot is due."""
        return min(self.steps, -(-(slot + 1) * self.sync_every // self.fragments))

    def fragment_of(self, slot: int) -> int:
        return slot % self.fragments
