"""Who takes part in a slot: a pure function of the headers, which every member of the exchange evaluates alike."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Header:
    """What an island says about its contribution before any bulk moves.

    version, digest: of the anchor the delta is based on. lineage: the fragment's history that led to it. steps, tokens: since
    the island last applied this fragment. tokens_total: committed tokens of that history. finite: the delta has no NaN
    or infinity.
    positions: consumed samples of the island's data shard.
    """

    island: int
    slot: int
    fragment: int
    version: int
    digest: str
    lineage: str
    tokens_total: int
    steps: int
    tokens: int
    finite: bool
    positions: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Header":
        """Raises ValueError when a field is missing or of another type."""
        values: dict[str, Any] = {}
        for f in fields(cls):
            value = data.get(f.name)
            if not isinstance(value, f.type if isinstance(f.type, type) else object) or (
                f.type is int and isinstance(value, bool)
            ):
                raise ValueError(f"header field {f.name} is {value!r}")
            values[f.name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Roll:
    """The decision on a slot: whose delta counts, who merely applies the result, who has to heal first."""

    contributors: tuple[int, ...]
    listeners: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The islands whose confirmation the slot needs, in order."""
        return tuple(sorted(self.contributors + self.listeners))


def call_roll(headers: Mapping[int, Header]) -> Roll:
    """Decide who takes part, from the headers of all members of the membership epoch.

    The history with most committed tokens is the run's (then the higher version, then the lexically larger lineage, so
    that the choice is total); islands on another base are behind. Of the rest, an island whose delta is not finite, or
    that made no step, applies the result without contributing to it.
    """
    best = max(headers.values(), key=lambda h: (h.tokens_total, h.version, h.lineage, h.digest))
    base = (best.version, best.digest, best.lineage)
    contributors, listeners, behind = [], [], []
    for island in sorted(headers):
        header = headers[island]
        if (header.version, header.digest, header.lineage) != base:
            behind.append(island)
        elif header.finite and header.steps > 0:
            contributors.append(island)
        else:
            listeners.append(island)
    return Roll(tuple(contributors), tuple(listeners), tuple(behind))
