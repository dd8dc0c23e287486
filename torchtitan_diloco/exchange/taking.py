"""Another's outer state, taken by an island that joins or heals: what differs travels, and what has come stays."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtitan_diloco.exchange.traffic import Moving
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.history import has_more
from torchtitan_diloco.outer.state import OuterState, combine


class StateTaker:
    """What has come is kept, so that a heal that breaks off goes on where it was, from whoever it is to be had next."""

    def __init__(self) -> None:
        self._coming: dict[str, Upload] = {}  # by tensor and history
        self._moving: Moving | None = None

    def done(self) -> None:
        """Nothing of what has come is needed any more."""
        self._coming, self._moving = {}, None

    def progress(self) -> str:
        """How far it has come, in words; "" while nothing is being taken. For another thread than the one that takes."""
        moving = self._moving
        if moving is None:
            return ""
        moving.reach(_here(self._coming))
        return str(moving)

    def take(
        self, state: OuterState, offered: Mapping[str, Any], get: Callable[[str, Upload], None], whole: bool
    ) -> int:
        """Make ``state`` what is offered: all of it, or the fragments that are further there. Returns the bytes it took.

        get: fetches what is missing of a tensor. What it raises passes through, and nothing is changed then. Raises
        ValueError, and changes nothing, when what has come is damaged; it is all fetched anew next time.
        """
        mine = state.describe()
        # Who brings more than the run has keeps it: the others will take it in their turn.
        whole = whole and not has_more(mine, offered["state"])
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
                    # The same history gives the same bits, whoever they come from.
                    key = f"{name} {theirs['lineage']} {theirs['digest']}"
                    coming[key] = self._coming.get(key) or Upload(4 * state.fragments[i].numel)
                    tensors[name] = coming[key].data.view(torch.float32)
                    parts.append((name, coming[key]))
        self._coming = coming  # what was begun of other versions is of no use any more
        self._moving = (
            Moving(sum(upload.nbytes for upload in coming.values()), _here(coming)) if parts else None
        )
        for name, upload in parts:
            get(name, upload)
        self._moving = None
        try:
            state.restore(description, tensors)
        except ValueError:
            self._coming = {}
            raise
        return sum(upload.nbytes for upload in coming.values())


def _here(coming: Mapping[str, Upload]) -> int:
    """Bytes that have come."""
    uploads = list(coming.values())
    return sum(u.nbytes - sum(stop - start for start, stop in u.missing()) for u in uploads)
