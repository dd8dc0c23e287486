"""The hub's state, taken by an island that joins or heals: what differs travels, and what has come stays."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_diloco.exchange.hub_link import Unreachable
from torchtitan_diloco.exchange.transport import Heal, Joined
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.state import OuterState, combine

HUB_SOURCE = -1
"""In a heal event, in the place of an island's number."""


@dataclass(frozen=True, slots=True)
class Taken:
    """settled: what was taken holds all slots that this island takes no part in."""

    joined: Joined
    settled: bool
    version: int


class StateTaker:
    """ask: for the description of the state. get: a tensor of it, by path."""

    def __init__(self, ask: Callable[[], dict[str, Any]], get: Callable[[str, Upload], None]) -> None:
        self._ask, self._get = ask, get
        self._coming: dict[str, Upload] = {}  # by tensor and history

    def done(self) -> None:
        """Nothing of what has come is needed any more."""
        self._coming = {}

    def take(self, state: OuterState, whole: bool) -> Taken:
        """Make ``state`` the hub's: all of it, or the fragments that are further there.

        Raises Unreachable, and changes nothing, when it could not be had or has come damaged; the next call goes on.
        """
        began = time.monotonic()
        offered = self._ask()
        mine = state.describe()
        description = offered["state"] if whole else combine(mine, offered["state"])
        tensors = state.tensors()
        coming: dict[str, Upload] = {}
        parts: list[tuple[str, Upload]] = []
        for i, (theirs, ours) in enumerate(zip(description["fragments"], mine["fragments"], strict=True)):
            if theirs == ours:
                continue
            for name in (f"anchor.{i}", f"momentum.{i}"):
                tensors.pop(name, None)
                if name in offered["tensors"]:
                    # The same history gives the same bits, whichever start of the hub they come from.
                    key = f"{name} {theirs['lineage']} {theirs['digest']}"
                    coming[key] = self._coming.get(key) or Upload(4 * state.fragments[i].numel)
                    tensors[name] = coming[key].data.view(torch.float32)
                    parts.append((name, coming[key]))
        self._coming = coming  # what was begun of other versions is of no use any more
        for name, upload in parts:
            self._get(offered.get("at", {}).get(name) or f"/state/{offered['key']}/{name}", upload)
        received = sum(upload.nbytes for upload in coming.values())
        try:
            state.restore(description, tensors)
        except ValueError as error:
            self._coming = {}
            raise Unreachable(f"the hub's state has come damaged: {error}") from error
        version = max(held.version for held in state.states)
        heal = Heal(HUB_SOURCE, received, time.monotonic() - began, version)
        present = tuple(int(i) for i in offered["present"])
        joined = Joined(int(offered["step"]), (heal,) if received else (), present)
        return Taken(joined, bool(offered["settled"]), version)
