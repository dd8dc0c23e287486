"""Who takes part in a slot: a pure function of the headers, which every member of the exchange evaluates alike."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchtitan_diloco.outer.shares import expand, split


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One start of one island. A restarted island is another member: what its predecessor promised does not bind it."""

    island: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Header:
    """What an island says about its contribution before any bulk moves.

    version, digest: of the anchor the delta is based on. lineage: the fragment's history that led to it. steps, tokens: since
    the island last applied this fragment. tokens_total: committed tokens of that history. finite: the delta has no NaN
    or infinity. positions: how far the island has read each stream it has read since the last committed slot (see
    ``shares``). skipped: up to where its streams were passed over, since the weights they led to were thrown away. holds:
    the shards it can read.
    guest: it reads streams that belong to members it believes to be gone.
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
    positions: dict[str, int]
    skipped: dict[str, int]
    holds: dict[str, str]
    guest: bool

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
        for key in ("positions", "skipped"):
            for name, position in _mapping(values, key, int).items():
                split(name)
                if not 0 <= position <= values["positions"].get(name, 0):
                    raise ValueError(f"header field {key} has {name}: {position}")
        for ranges in _mapping(values, "holds", str).values():
            expand(ranges)
        return cls(**values)


def _mapping(values: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    value = values[name]
    if not isinstance(value, dict) or any(
        type(k) is not str or type(v) is not kind for k, v in value.items()
    ):
        raise ValueError(f"header field {name} is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Roll:
    """The decision on a slot: whose delta counts, who merely applies the result, who has to heal first.

    skipped: listeners whose delta is not finite; the samples that led to it are passed over for good. contested: listeners
    that read a stream another one has read as well.
    """

    contributors: tuple[int, ...]
    listeners: tuple[int, ...]
    behind: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    contested: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The islands whose confirmation the slot needs, in order."""
        return tuple(sorted(self.contributors + self.listeners))


def call_roll(headers: Mapping[int, Header]) -> Roll:
    """Decide who takes part, from the headers of all members of the membership epoch.

    The history with most committed tokens is the run's (then the higher version, then the lexically larger lineage, so
    that the choice is total); islands on another base are behind. Of the rest, an island whose delta is not finite, or
    that made no step, applies the result without contributing to it. So does one that has read a stream which another
    has read too (members go before guests, then lower ids): no sample enters the anchor twice, whatever led to it.
    """
    best = max(headers.values(), key=lambda h: (h.tokens_total, h.version, h.lineage, h.digest))
    base = (best.version, best.digest, best.lineage)
    current = {i: h for i, h in headers.items() if (h.version, h.digest, h.lineage) == base}
    contributors: list[int] = []
    skipped: list[int] = []
    contested: list[int] = []
    taken: set[str] = set()
    for island in sorted(current, key=lambda i: (current[i].guest, i)):
        header = current[island]
        worked = header.steps > 0
        if not worked:
            continue
        if taken & header.positions.keys():
            contested.append(island)
            continue
        taken |= header.positions.keys()
        (contributors if header.finite else skipped).append(island)
    return Roll(
        contributors=tuple(sorted(contributors)),
        listeners=tuple(sorted(current.keys() - set(contributors))),
        behind=tuple(sorted(headers.keys() - current.keys())),
        skipped=tuple(sorted(skipped)),
        contested=tuple(sorted(contested)),
    )
