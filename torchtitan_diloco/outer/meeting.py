"""Islands that train in lock step meet: whose state is the run's, who has to take it, who does not fit. A pure function.

Everybody gets the same records and comes to the same verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan_diloco.outer.account import Account


@dataclass(frozen=True, slots=True)
class Record:
    """What an island says of itself when a group forms.

    started: epoch seconds of this incarnation. member: it has trained with the others, or is about to. settings: what must
    be equal. holds: the shards it can read, by source. moments: it has an optimizer state.
    """

    island: int
    incarnation: str
    started: float
    run_id: str
    member: bool
    settings: Mapping[str, Any]
    holds: Mapping[str, str]
    moments: bool
    account: Account

    def rank(self) -> tuple[bool, int, int, int, float, str]:
        """Members before newcomers, then whoever is furthest, then the lowest id; of twins the one that was there first."""
        progress = self.account.step, self.account.tokens_total
        return self.member, *progress, -self.island, -self.started, self.incarnation

    def to_json(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "account": self.account.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Raises ValueError, KeyError or TypeError for what ``to_json`` does not give."""
        return cls(**{**data, "account": Account.from_json(data["account"])})


@dataclass(frozen=True, slots=True)
class Verdict:
    """records: in the group's order. source: index of the one whose state is the run's. behind: indices that must take it.
    refused: by index, why. complete: there are enough islands to found the run, or it is there already.
    """

    records: Sequence[Record]
    source: int
    behind: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    complete: bool = True


def meet(records: Sequence[Record], num_islands: int) -> Verdict:
    """records: of all islands of the group, in its order."""
    source = max(range(len(records)), key=lambda i: records[i].rank())
    reference = records[source]
    refused = {}
    for i, record in enumerate(records):
        if i != source and (why := _misfit(record, reference, records)):
            refused[i] = why
    behind = tuple(
        i
        for i, r in enumerate(records)
        if i not in refused and r.account.identity != reference.account.identity
    )
    complete = any(r.member for r in records) or len(records) - len(refused) >= num_islands
    return Verdict(records, source, behind, refused, complete)


def _misfit(record: Record, reference: Record, records: Sequence[Record]) -> str | None:
    if record.run_id != reference.run_id:
        return (
            f"lighthouse.address: the islands of another run ({reference.run_id}) ask this Lighthouse; with semi_sync.method "
            '= "sync" a run needs one of its own'
        )
    if any(r.island == record.island and r.rank() > record.rank() for r in records):
        return f"island.id: another process says that it is island {record.island} as well; give each island its own id"
    mine, theirs = record.settings, reference.settings
    keys = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
    if not keys:
        return None
    shown = "; ".join(f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in keys)
    return f"island {record.island} and island {reference.island} must agree on {shown}"
