"""The common sequence of slots: which fragment slot k exchanges, and at which step of run progress it is due."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotClock:
    """Slots of a run of ``steps`` inner steps in which each of ``fragments`` fragments is sent every ``sync_every``.

    Slot k exchanges fragment ``k mod fragments`` and is due once ``(k + 1) * sync_every / fragments`` inner steps of run
    progress are done; the last step of the run is always a slot, so that no training is left out of the anchor.
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

    def slot_after(self, step: int) -> int | None:
        """The slot that is due when ``step`` inner steps of run progress are done, or None."""
        reached = step * self.fragments // self.sync_every
        if reached > (step - 1) * self.fragments // self.sync_every:
            return reached - 1
        return reached if step == self.steps else None

    def first_slot_from(self, step: int) -> int:
        """The number of the first slot an island at ``step`` still has to attempt."""
        return step * self.fragments // self.sync_every

    def due(self, slot: int) -> int:
        """The step at which a slot is due."""
        return min(self.steps, -(-(slot + 1) * self.sync_every // self.fragments))

    def fragment_of(self, slot: int) -> int:
        return slot % self.fragments
