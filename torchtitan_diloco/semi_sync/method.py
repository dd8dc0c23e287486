"""The interface of a semi-synchronous method, what it is given, and the registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.data.ledger import Ledger
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.lockstep import Lockstep
from torchtitan_diloco.exchange.transport import Transport
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.island.replica import Replica
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.outer.names import METHOD, add, load_declared
from torchtitan_diloco.semi_sync.share import SampleFeed


@dataclass(slots=True)
class Setup:
    """Everything a method works with, on each rank of the island.

    make_transport: builds the transport, called on the gateway only, with the merge rule. steps: of run progress.
    sync_every: the island's own, in place of the run's.
    settings: what all islands must agree on. feed: the data loader, if it accounts for its samples. ledger: on the gateway,
    where that account is written. make_lockstep: builds this rank's link to the others for a method that acts within inner
    steps, on the training state that ``replica`` is.
    """

    config: SemiSyncConfig
    steps: int
    island: int
    incarnation: str
    started: float
    run_id: str
    group: IslandGroup
    parameters: IslandParameters
    trace: Trace
    drain: DrainFlag
    make_transport: Callable[..., Transport]
    sync_every: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    feed: SampleFeed | None = None
    ledger: Ledger | None = None
    dump_sends: Path | None = None
    make_lockstep: Callable[[IslandGroup], Lockstep] | None = None
    replica: Replica | None = None


class Discarded(Exception):
    """The inner step under way is not to be taken; its gradients are of no use. Raised on all ranks of the island."""


class SemiSync(ABC):
    """A method. Every call is made on all ranks of the island together, at the same inner step.

    Steps are those of the island, numbered through the run, unless called run progress.
    """

    @abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abstractmethod
    def join(self, step: int) -> int:
        """Enter the run, before the first inner step. ``step``: where this island's own state stands.

        Returns the step to go on from. Raises UserError or Resumable.
        """

    def inner_step(self, step: int, train: Callable[[int], None]) -> int:
        """Make the inner step that leads to ``step``: call ``train(step)``, again after it raised ``Discarded``.

        Returns the step that was made; another one where another island's state was taken first, and none at all where that
        is the run's last. Raises UserError or Resumable.
        """
        train(step)
        return step

    def after_backward(self) -> None:  # noqa: B027 - most methods leave gradients alone
        """A backward pass is done (of several, with gradient accumulation); nothing has used the gradients yet."""

    @abstractmethod
    def after_inner_step(self, step: int, tokens: int) -> int:
        """An inner step of the island, with ``tokens`` tokens, has brought it to ``step``.

        Returns the step to go on from: ``step``, or where another island stands when this one had fallen behind and healed.
        """

    def progress(self, step: int) -> int:
        """Run progress at a step of this island."""
        return step

    def last_step(self) -> int | None:
        """The step of this island at which the run ends; None where that is the run's own number of steps."""
        return None

    def pause(self) -> None:  # noqa: B027 - most methods have nothing under way between inner steps
        """Settle whatever is under way, since the island is about to save and stop."""

    def complete(self) -> bool:
        """Whether nothing is left to exchange once all inner steps of the run are done. The same on all ranks."""
        return True

    @abstractmethod
    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a checkpoint must hold beside the trainer's state: JSON and flat tensors (on the gateway; else empty)."""

    @abstractmethod
    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take back what ``state`` gave, before ``join``. Raises ValueError when it does not fit."""

    @abstractmethod
    def leave(self, reason: str) -> None:
        """The island goes. Idempotent; also called when training failed."""


_METHODS: dict[str, type[SemiSync]] = {}


def register_semi_sync(name: str) -> Callable[[type[SemiSync]], type[SemiSync]]:
    """Class decorator: make a method selectable as ``[semi_sync] method = "<name>"``."""

    def register(cls: type[SemiSync]) -> type[SemiSync]:
        _METHODS[name] = cls
        add(METHOD, name)
        return cls

    return register


def method_class(name: str) -> type[SemiSync]:
    """Raises UserError, listing what is registered, for an unknown method."""
    if name not in _METHODS:
        load_declared(METHOD, name)
    if name not in _METHODS:
        raise UserError(
            f'semi_sync.method: "{name}" is not a method; registered are {", ".join(sorted(_METHODS))}'
        )
    return _METHODS[name]


def make_method(setup: Setup) -> SemiSync:
    """The method that ``[semi_sync] method`` names. Raises UserError when it is unknown."""
    return method_class(setup.config.method)(setup)
