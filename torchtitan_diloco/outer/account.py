"""What islands in lock step keep account of: how far the run is, by which history, and the slot under way. Pure."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.outer.digest import link

FORMAT = 1


@dataclass(slots=True)
class Account:
    """The same on all islands that have made the same steps on the same parameters.

    step: inner steps made. slot: the next to close. lineage: hash chain over the steps. origin, digest: of the run's first
    parameters, and of those at the last slot. positions: how far each stream was read (see ``shares``). share: of the slot
    under way, by island, in steps; tokens: in it, of all islands.
    """

    step: int = 0
    slot: int = 0
    tokens_total: int = 0
    lineage: str = ""
    origin: str = ""
    digest: str = ""
    positions: dict[str, int] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def identity(self) -> str:
        """Equal where all history is."""
        return hashlib.sha256(f"{self.origin} {self.lineage} {self.digest}".encode()).hexdigest()

    def made(self, step: int, islands: Collection[int], tokens: int, positions: Mapping[str, int]) -> None:
        """Account for a step of these islands, with ``tokens`` each, that has brought streams to ``positions``."""
        self.step = step
        self.tokens_total += tokens * len(islands)
        self.tokens += tokens * len(islands)
        self.positions |= positions
        for island in islands:
            self.share[island] = self.share.get(island, 0.0) + 1 / len(islands)
        read = hashlib.sha256(json.dumps(sorted(self.positions.items())).encode()).hexdigest()
        self.lineage = link(self.lineage, step - 1, 0, read, sorted(islands), islands)

    def close_slot(self, following: int, digest: str) -> None:
        """The slot ends with parameters of this digest; ``following`` is the next."""
        self.slot, self.digest = following, digest
        self.share, self.tokens = {}, 0

    def weights(self) -> dict[int, float]:
        """Each island's share of the gradients of the slot under way; the sum is 1."""
        steps = sum(self.share.values())
        return {island: share / steps for island, share in sorted(self.share.items())}

    def take(self, other: "Account") -> None:
        """Become equal to another island's."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        share = {str(island): steps for island, steps in sorted(self.share.items())}
        return {"format": FORMAT, **values, "positions": dict(sorted(self.positions.items())), "share": share}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Account":
        """Raises ValueError or KeyError for what ``to_json`` does not give."""
        if data.get("format") != FORMAT:
            raise ValueError(f"the account has format {data.get('format')!r}, this version reads {FORMAT}")
        values: dict[str, Any] = {
            name: int(data[name]) for name in ("step", "slot", "tokens_total", "tokens")
        }
        values |= {name: str(data[name]) for name in ("lineage", "origin", "digest")}
        values["positions"] = {str(name): int(position) for name, position in data["positions"].items()}
        values["share"] = {int(island): float(steps) for island, steps in data["share"].items()}
        return cls(**values)
