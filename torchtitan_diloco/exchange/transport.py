"""What a transport offers to a method, and the registry of transports.

Method and transport are orthogonal: any method runs over any transport. Only the gateway of an island holds one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.outer.names import TRANSPORT, add, load_declared
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterState, OuterStep


@dataclass(frozen=True, slots=True)
class Heal:
    """State taken from another island: ``bytes`` over the wire in ``seconds``, giving the anchor ``version``."""

    source: int
    bytes: int
    seconds: float
    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The island is a member.

    step: where in run progress it goes on. heals: what it had to take to get there. present: the islands that are there.
    """

    step: int
    heals: tuple[Heal, ...] = ()
    present: tuple[int, ...] = ()

    def as_one_heal(self) -> Heal:
        """Where the run moved on meanwhile, the state was taken more than once; to the island it is one heal."""
        size, seconds = sum(heal.bytes for heal in self.heals), sum(heal.seconds for heal in self.heals)
        return Heal(self.heals[-1].source, size, seconds, self.heals[-1].version)


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom or what the transport waits, and since when (epoch seconds).

    target: numbers of islands, or what it is in words. why: what is to come, from which addresses, and how much of it has.
    slot: the one that it is about, if any.
    """

    target: str | tuple[int, ...]
    since: float
    why: str
    slot: int | None = None

    def more(self, words: str) -> "Waiting":
        """With this added to the reason."""
        return replace(self, why=f"{self.why}; {words}") if words else self

    def __str__(self) -> str:
        if isinstance(self.target, str):
            return f"{self.target}: {self.why}"
        return f"island{'s' * (len(self.target) > 1)} {', '.join(map(str, self.target))}: {self.why}"


@dataclass(frozen=True, slots=True)
class Hello:
    """What an island brings to the run.

    started: epoch seconds at which this incarnation began; the newest of an island counts. num_islands: how many found
    the run. settings: what must agree between islands. step: where in run progress its own state stands. finished: that is
    the end of the run, and the island is here only for those that have not got there. found: how many may found it once
    patience is over, see ``outer.founding``.
    """

    island: int
    incarnation: str
    started: float
    run_id: str
    num_islands: int
    settings: dict[str, Any]
    step: int
    finished: bool = False
    found: str = "wait_all"


class Transport(ABC):
    """Carries slots between islands. Methods are called from the training thread and block only where they say so."""

    @abstractmethod
    def join(self, hello: Hello, state: OuterState) -> Joined:
        """Found the run or enter it. Blocks until this island is a member; ``state`` then holds the run's outer state.

        A finished island gives its state to those that lack it, and blocks until no other island is behind.

        Raises UserError when the islands' settings disagree, Resumable when patience runs out or ``stop`` was called.
        """

    @abstractmethod
    def publish(self, state: OuterState) -> None:
        """Offer this state to islands that heal."""

    @abstractmethod
    def progress(self, step: int) -> None:
        """Where in run progress this island stands; a joiner goes on from there."""

    @abstractmethod
    def offer(self, header: Header, payload: torch.Tensor, outer_step: OuterStep) -> None:
        """Start on a slot without blocking; others may be open. payload: 1-D uint8 on the CPU, left alone from now on.

        outer_step: from the state that the header names. It is taken beside training, before the slot is known to commit.
        """

    @abstractmethod
    def result(self, slot: int, timeout_s: float) -> Outcome | None:
        """The outcome of an offered slot, once, or None when it is not known within ``timeout_s``."""

    @abstractmethod
    def withdraw(self) -> None:
        """Give up the open slots that this island has not confirmed yet; ``result`` says how each ended."""

    @abstractmethod
    def heal(self, state: OuterState) -> Joined:
        """Replace ``state`` by the newest that another member holds. Blocks. Raises Resumable when there is none."""

    @abstractmethod
    def waiting(self) -> Waiting | None:
        """Whom this island waits for at the moment."""

    @abstractmethod
    def stop(self) -> None:
        """Make a blocked ``join`` or ``heal`` raise Resumable soon. Callable from a signal-driven thread."""

    @abstractmethod
    def leave(self, reason: str) -> None:
        """Say goodbye, so that nobody waits for this island, and release everything. Idempotent."""


MakeTransport = Callable[..., Transport]
"""Called with the [island], [lighthouse] and [transport] sections and the merge rule."""

Made = TypeVar("Made", bound=MakeTransport)

_TRANSPORTS: dict[str, MakeTransport] = {}


def register_transport(name: str) -> Callable[[Made], Made]:
    """Decorator of a class or function: make a transport selectable as ``[transport] kind = "<name>"``."""

    def register(make: Made) -> Made:
        _TRANSPORTS[name] = make
        add(TRANSPORT, name)
        return make

    return register


def transport_class(name: str) -> MakeTransport:
    """Raises UserError, listing what is registered, for an unknown name."""
    if name not in _TRANSPORTS:
        load_declared(TRANSPORT, name)
    if name not in _TRANSPORTS:
        raise UserError(
            f'transport.kind: "{name}" is not a transport; registered are {", ".join(sorted(_TRANSPORTS))}'
        )
    return _TRANSPORTS[name]
