"""One slot on the hub, from its first header to its outcome."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.merge import Contribution, Merged, Weight, weights
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.outcome import Settlement
from torchtitan_diloco.outer.policy import Header, Member, Roll, call_roll
from torchtitan_diloco.outer.state import Advance, FragmentState


@dataclass(frozen=True, slots=True)
class Record(Settlement):
    """How a slot ended, for those who took part in it; to all others it is "behind".

    takers: the islands that can apply it. digest: of the new anchor, and the checksum of the merged delta. nbytes: of the
    encoded result.
    """

    status: Literal["committed", "failed"]
    takers: tuple[int, ...] = ()
    digest: str = ""
    nbytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Raises ValueError for anything that ``to_json`` does not give."""
        try:
            values = dict(data)
            for name in ("takers", "participants", "contested", "present"):
                values[name] = tuple(int(i) for i in values[name])
            for name in ("positions", "skipped", "members"):
                values[name] = {int(i): dict(of) for i, of in values[name].items()}
            return cls(**{**values, "weights": tuple(float(w) for w in values["weights"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed outcome: {error!r}") from error


@dataclass(slots=True)
class Open:
    """A slot that is not settled. began: on the hub's clock. behind: islands on another base than the run's."""

    slot: int
    fragment: int
    began: float
    headers: dict[Member, Header] = field(default_factory=dict)
    uploads: dict[Member, Upload] = field(default_factory=dict)
    roll: Roll | None = None
    behind: tuple[int, ...] = ()
    merging: bool = False

    def hear(self, member: Member, header: Header) -> None:
        """What an island says takes the place of what an earlier start of it has said."""
        for earlier in [m for m in self.headers if m.island == member.island and m != member]:
            del self.headers[earlier]
            self.uploads.pop(earlier, None)
        self.headers[member] = header

    def drop(self, member: Member) -> bool:
        """Without what this member has said, unless its contribution is here already; whether that changed anything."""
        if self.merging or member not in self.headers:
            return False
        upload = self.uploads.get(member)
        counted = self.roll is not None and member.island in self.roll.contributors
        if counted and upload is not None and upload.complete:
            return False
        del self.headers[member]
        self.uploads.pop(member, None)
        self.roll = None
        return True

    def call(self, held: FragmentState, weight: Weight) -> tuple[tuple[int, ...], str]:
        """Call the roll of those whose delta is based on what the hub holds. Returns who they are, and why the slot fails.

        The latter is empty where it need not.
        """
        headers = self.by_island()
        base = (held.version, held.digest, held.lineage)
        current = {i: h for i, h in headers.items() if (h.version, h.digest, h.lineage) == base}
        self.behind = tuple(sorted(headers.keys() - current.keys()))
        self.roll = call_roll(current) if current else None
        contributors = self.roll.contributors if self.roll else ()
        reason = ""
        if not can_be_weighed([current[i] for i in contributors], weight):
            if contributors:
                reason = "the contributors have no tokens to be weighed by"
            elif any(h.finite for h in current.values()):
                reason = "no island has made a step since it last applied the fragment"
            else:
                reason = "no delta is finite" if current else "no island holds the run's anchor"
        return tuple(sorted(current)), reason

    def standing(self, member: Member, unheard: list[int], nbytes: int) -> dict[str, Any]:
        """What the slot waits for, as this member is told. unheard: islands without a header. nbytes: of a payload."""
        header = self.headers.get(member)
        if self.roll is None and header is None:
            return {"status": "unknown"}
        if self.roll is None:
            phase, islands = "headers", unheard
        else:
            phase, islands = ("merge", []) if self.merging else ("payloads", self.uploading())
        missing: list[tuple[int, int]] = []
        if header is not None and not self.merging and header.finite and header.steps > 0:
            upload = self.uploads.get(member)
            missing = upload.missing() if upload else [(0, nbytes)]
        return {"status": "open", "phase": phase, "islands": islands, "missing": missing}

    def take(self) -> list[Contribution]:
        """What is merged; it takes no more chunks."""
        assert self.roll is not None
        of = {member.island: member for member in self.headers}
        found = []
        for member in (of[island] for island in self.roll.contributors):
            header, payload = self.headers[member], self.uploads[member].data
            found.append(Contribution(member.island, header.steps, header.tokens, payload, spare=True))
        self.uploads = {}
        return found

    def committed(self, job: "Job", present: tuple[int, ...]) -> Record:
        """Its outcome once the job is done. present: the run's members now."""
        assert self.roll is not None and job.advance is not None and job.payload is not None
        roll, heard = self.roll, self.by_island()
        return Record(
            self.slot,
            "committed",
            takers=roll.members,
            digest=f"{job.advance.digest} {job.advance.merged}",
            nbytes=job.payload.nbytes,
            participants=roll.contributors,
            weights=job.weights,
            tokens=sum(heard[i].tokens for i in roll.contributors),
            positions={i: heard[i].positions for i in (*roll.contributors, *roll.skipped)},
            skipped={i: heard[i].skipped for i in roll.contributors}
            | {i: heard[i].positions for i in roll.skipped},
            members={i: heard[i].holds for i in roll.members},
            contested=roll.contested,
            present=present,
        )

    def by_island(self) -> dict[int, Header]:
        return {member.island: header for member, header in self.headers.items()}

    def uploading(self) -> list[int]:
        """Contributors whose payload is not all here."""
        assert self.roll is not None
        done = {m.island for m, upload in self.uploads.items() if upload.complete and m in self.headers}
        return [i for i in self.roll.contributors if i not in done]


def can_be_weighed(headers: Sequence[Header], kind: Weight) -> bool:
    try:
        weights([(header.steps, header.tokens) for header in headers], kind)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class Job:
    """The merge of a slot and the outer step on it. ``run`` takes a while and touches nothing of the hub but its merger."""

    slot: int
    fragment: int
    contributions: list[Contribution]
    merger: Merger
    outer_step: Callable[[Merged], Advance]
    payload: torch.Tensor | None = None
    weights: tuple[float, ...] = ()
    advance: Advance | None = None

    def run(self) -> None:
        slices = range(len(self.merger.sizes(self.fragment)))
        self.payload, weights = self.merger.own(self.fragment, self.slot, slices, self.contributions)
        self.contributions = []
        # From what all islands get, so that their outer step is this one.
        self.advance = self.outer_step(self.merger.decode(self.fragment, self.payload))
        self.weights = tuple(weights)
