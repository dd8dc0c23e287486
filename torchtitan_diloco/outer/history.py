"""Whether two histories of a run have parted, and which of them is the run's. Pure, on descriptions of outer states.

A fragment's description holds a *trail*: a mark (the beginning of the lineage) of each of its last versions. So an island
that comes back can be told from one that has gone on by itself, without the run's whole history.
"""

from collections.abc import Mapping
from typing import Any

MARK = 8
"""Characters of a version's lineage; against accidents, for which 32 bits are plenty."""
KEPT = 512
"""Versions of a fragment that leave a mark."""

State = Mapping[str, Any]
"""As ``OuterState.describe`` gives it."""


def extend(trail: str, lineage: str) -> str:
    """The trail once a version with this lineage is committed."""
    return (trail + lineage[:MARK])[-MARK * KEPT :]


def _mark(entry: Mapping[str, Any], version: int) -> str | None:
    """What the fragment's history had at that version, not a later one than its own; None where that is forgotten."""
    back = entry["version"] - version
    trail = entry.get("trail") or entry["lineage"][:MARK]  # earlier formats have none
    start = len(trail) - MARK * (back + 1)
    return trail[start : start + MARK] if start >= 0 else None


def _has_parted(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    version = min(mine["version"], theirs["version"])
    if version == 0:  # what islands begin with is no history
        return False
    before, after = _mark(mine, version), _mark(theirs, version)
    # Where it is too long ago to tell, nothing that may be the only copy is given up unseen.
    return before is None or after is None or before != after


def have_parted(mine: State, theirs: State) -> bool:
    """Whether either holds committed slots that the other does not go on from, in any fragment, or may do so."""
    return any(_has_parted(a, b) for a, b in zip(mine["fragments"], theirs["fragments"], strict=True))


def tokens_of(state: State) -> int:
    """Committed tokens, summed over the fragments."""
    return sum(entry["tokens"] for entry in state["fragments"])


def _rank(state: State) -> tuple[int, int, list[str]]:
    entries = state["fragments"]
    lineages = [entry["lineage"] + entry["digest"] for entry in entries]
    return tokens_of(state), sum(entry["version"] for entry in entries), lineages


def outranks(mine: State, theirs: State) -> bool:
    """Of two histories the one with more committed tokens is the run's; of equals, one that everybody picks alike."""
    return _rank(mine) > _rank(theirs)


def has_more(mine: State, theirs: State) -> bool:
    """Whether it has more committed tokens: enough for a newcomer to bring a running run to its state."""
    return tokens_of(mine) > tokens_of(theirs)
