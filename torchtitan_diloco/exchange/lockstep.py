"""What a method needs of a link that keeps islands in step: one group at a time, the same for all, and its collectives.

Every rank of an island has one; rank r of all islands form a group. ``managed`` makes it of TorchFT's Manager.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Cost:
    """What averaging has cost this rank: seconds that it waited, bytes it sent (it received as many)."""

    seconds: float = 0.0
    sent: int = 0


class Lockstep(ABC):
    """One rank's side. Calls block; all but ``average`` are made between, or instead of, the steps of the model."""

    cost: Cost
    patience_s: float
    """How long to wait for other islands."""

    @abstractmethod
    def ask(self, step: int) -> bool:
        """Agree with the other islands on who takes part in the step after ``step``; False if that took too long."""

    @property
    @abstractmethod
    def is_new(self) -> bool:
        """Whether the group is another than before, or its islands do not all stand at the same step."""

    @property
    @abstractmethod
    def islands(self) -> tuple[int, ...]:
        """Ids of the islands of the group, in the group's order; one may be there twice, by mistake of its owner."""

    @abstractmethod
    def connect(self) -> None:
        """Make the group's connections, if they are not there. Raises RuntimeError when they cannot be made."""

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Everybody's message, in the group's order. Raises RuntimeError."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` (contiguous, on the CPU) by that of the group's member ``source``. Raises RuntimeError."""

    @abstractmethod
    def average(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its mean over the group. Never raises; after an error it does nothing, see ``errored``."""

    @abstractmethod
    def vote(self, ballot: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all ballots (int64, 1-D, equally long). Raises RuntimeError."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether something went wrong on this rank since ``ask``."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """The step is not to be taken: hang up, so that the others notice at once."""

    @abstractmethod
    def commit(self) -> bool:
        """Whether no rank of this island has failed; the same on all of them. Once after each ``ask`` that was used."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Idempotent."""
