"""States on their way: to islands that join or heal, and from an island whose history is the run's."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtitan_diloco.hub.far import digest_of, last_read
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.workshop import Workshop
from torchtitan_diloco.outer.history import have_parted, tokens_of
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState, combine

logger = logging.getLogger(__name__)

SHELVED = 2  # states that joiners may be reading
UNREAD_S = 30.0  # after which a state that nobody reads is let go


class Shelf:
    """Consistent states that stay as they are while somebody reads them, however often the run commits."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._states: dict[str, OuterState] = {}
        self._read: dict[str, float] = {}  # when it was last asked for
        self._readers: dict[Member, str] = {}

    def put(self, state: OuterState, reader: Member) -> str:
        """Returns the key by which its tensors can be had for a while; it names this very state, on any start of the hub."""
        key = hashlib.sha256(json.dumps(state.describe()).encode()).hexdigest()[:16]
        self._states.setdefault(key, state.copy())
        self._read[key] = self._now()
        self._readers[reader] = key
        while len(self._states) > SHELVED:
            del self._states[min(self._states, key=self._read.__getitem__)]
        return key

    def done(self, reader: Member) -> None:
        """It has what it wanted."""
        self._readers.pop(reader, None)
        self.tidy()

    def tensor(self, key: str, name: str) -> torch.Tensor:
        """Raises Refusal."""
        state = self._states.get(key)
        tensor = state.tensors().get(name) if state else None
        if tensor is None:
            raise Refusal("gone", f"{name} of state {key} is no longer held")
        self._read[key] = self._now()
        return tensor

    def tidy(self) -> None:
        """Let go of what nobody reads: it keeps the memory of versions that are past."""
        for key, state in self._states.items():
            self._read[key] = max(self._read[key], last_read(state))
        unread = {key for key, at in self._read.items() if self._now() - at > UNREAD_S}
        self._readers = {reader: key for reader, key in self._readers.items() if key not in unread}
        self._read = {key: at for key, at in self._read.items() if key in self._readers.values()}
        self._states = {key: state for key, state in self._states.items() if key in self._read}


class Arrivals:
    """Tensors that islands bring, because their history is longer than what the hub holds."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._coming: dict[Member, dict[str, Upload]] = {}

    def adopt(
        self, member: Member, state: OuterState, described: Mapping[str, Any], founding: bool
    ) -> dict[str, list[tuple[int, int]]]:
        """Make ``state`` the described one (where it is further, unless it founds the run) from what the member has brought.

        Returns what it has yet to bring, by tensor the ranges of bytes; nothing is changed then. Raises Refusal when what
        it has brought does not fit the description.
        """
        mine = state.describe()
        description = dict(described) if founding else combine(mine, described)
        wanted: dict[str, tuple[int, int]] = {}  # name -> fragment, bytes
        held = {} if founding else state.tensors()
        for i, (entry, own) in enumerate(zip(description["fragments"], mine["fragments"], strict=True)):
            if entry == own and not founding:
                continue
            names = [f"anchor.{i}"]
            if state.optimizer.keeps_momentum and entry["version"] > 0:
                names.append(f"momentum.{i}")
            wanted |= dict.fromkeys(names, (i, 4 * state.fragments[i].numel))
            held = {name: t for name, t in held.items() if name not in (f"anchor.{i}", f"momentum.{i}")}
        coming = self._coming.setdefault(member, {})
        for name, (i, nbytes) in wanted.items():
            if name not in coming:
                coming[name] = self._workshop.upload(name.partition(".")[0], i, nbytes, member)
        missing = {name: coming[name].missing() for name in wanted if not coming[name].complete}
        if missing:
            return missing
        del self._coming[member]
        brought = {name: coming[name].values() for name in wanted}
        try:
            state.restore(description, held | brought, digest_of)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal("refused", f"the state of island {member.island} does not fit: {error}") from error
        self._coming.clear()
        if have_parted(mine, described):
            logger.warning(
                "the state of island %d, with %d committed tokens, takes the place of what this hub held with %d: the two "
                "histories have parted; islands that hold the other one put it aside when they come",
                member.island, tokens_of(described), tokens_of(mine),
            )  # fmt: skip
        return {}

    def of(self, member: Member, name: str) -> Upload:
        """Where a tensor goes. Raises Refusal when nobody asks for it."""
        upload = self._coming.get(member, {}).get(name)
        if upload is None:
            raise Refusal("gone", f"nobody asks for {name} of island {member.island}")
        return upload

    def drop(self, member: Member) -> None:
        self._coming.pop(member, None)
