"""What faults have cost a run, from the events of its islands: pure arithmetic on what they wrote.

Goodput: tokens in committed slots over the tokens that the same islands commit in the same wall time without faults, each at
its own median inner step.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_diloco.observe.reading import Event

STOPS = ("kill", "freeze", "walltime", "disk_full", "nan", "cut")
"""Faults after which their island may make no steps for a while. A cut-off one trains on to where it needs the others."""
ENDS = ("kill", "walltime")
"""Faults that end the incarnation they befall."""
HARMLESS_TO_OTHERS = ("kill", "freeze", "cut", "meeting")
"""Faults that the other islands are to notice within the heartbeat window."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault as it was brought. t, until: epoch seconds. island: None for what all meet at."""

    t: float
    kind: str
    island: int | None
    until: float

    @property
    def stops(self) -> bool:
        """Whether its island may make no step meanwhile."""
        return self.kind in STOPS


@dataclass(frozen=True, slots=True)
class Pace:
    """Of an undisturbed island. step_s: median seconds of an inner step; tokens: of one inner step."""

    step_s: float
    tokens: int


@dataclass(slots=True)
class Goodput:
    """goodput, expected: shares of what is committed without faults; expected is 1 - what the faults took by themselves (from
    each to its island's next inner step, and the steps that no committed slot holds). downtime_s: island-seconds by kind of
    fault. uncommitted_s: of inner steps. stall_s: island-seconds that waited for exchanges, those of the faults included.
    gap_s: longest pause between inner steps of islands that nothing had befallen, while something had befallen another, by
    kind. problems: of digests and losses."""

    wall_s: float
    committed: int
    possible: int
    goodput: float
    expected: float
    uncommitted_s: float
    stall_s: float = 0.0
    downtime_s: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    gap_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pace_of(events: Sequence[Event]) -> Pace:
    """Raises ValueError where there is no inner step."""
    inner = [e for e in events if e["event"] == "inner"]
    if not inner:
        raise ValueError("an island has made no inner step")
    return Pace(statistics.median(float(e["seconds"]) for e in inner), int(inner[-1]["tokens"]))


def measure(
    events: Mapping[int, Sequence[Event]],
    faults: Sequence[Happened],
    began: float,
    ended: float,
    fragments: int,
    sync_every: Mapping[int, int],
) -> Goodput:
    """events: of each island, in their order, with an `inner` event for every step. began, ended: epoch seconds.

    sync_every: inner steps of each island in a window. Raises ValueError where an island has made no inner step.
    """
    paces = {island: pace_of(own) for island, own in events.items()}
    wall_s = ended - began
    possible = 0
    for island, pace in paces.items():
        windows = math.floor(wall_s / pace.step_s / sync_every[island] * fragments)
        possible += windows * sync_every[island] * pace.tokens
    # Every token counts once in each of the fragments.
    possible //= fragments
    slots = {
        int(e["round"]): int(e["tokens"])
        for own in events.values()
        for e in own
        if e["event"] == "round" and e["committed"] and began < e["t"] <= ended
    }
    committed = sum(slots.values()) // fragments
    trained = sum(
        paces[island].tokens
        for island, own in events.items()
        for e in own
        if e["event"] == "inner" and began < e["t"] <= ended
    )
    downtime: dict[str, float] = defaultdict(float)
    lost_tokens = 0.0
    for fault in faults:
        if fault.island is None or not fault.stops:
            continue
        seconds = _downtime(events[fault.island], fault, began, ended, paces[fault.island].step_s)
        downtime[fault.kind] += seconds
        lost_tokens += seconds / paces[fault.island].step_s * paces[fault.island].tokens
    rate = sum(pace.tokens / pace.step_s for pace in paces.values())
    uncommitted = max(0, trained - committed)
    counts: dict[str, int] = defaultdict(int)
    for fault in faults:
        counts[fault.kind] += 1
    return Goodput(
        wall_s,
        committed,
        possible,
        committed / possible if possible else 0.0,
        1 - (lost_tokens + uncommitted) / (rate * wall_s),
        uncommitted / rate * len(paces),
        sum(
            float(e["stall_s"] or 0.0)
            for own in events.values()
            for e in own
            if e["event"] == "round" and began < e["t"] <= ended
        ),
        dict(downtime),
        dict(counts),
        _gaps(events, faults),
        [*different_digests(events), *_bad_losses(events, faults)],
    )


def _downtime(events: Sequence[Event], fault: Happened, began: float, ended: float, step_s: float) -> float:
    """Seconds without inner steps, of the pauses that begin before the fault is over (for one that ends the incarnation:
    before the next one's first step), each less the step with which it ends. Before ``began`` and after ``ended`` nothing
    counts."""
    steps = [e for e in events if e["event"] == "inner" and e["t"] <= ended]
    before = {e["incarnation"] for e in events if e["t"] <= fault.t}
    over = min(fault.until, ended)
    if fault.kind in ENDS:
        over = next((float(e["t"]) for e in steps if e["incarnation"] not in before), ended)
    times = [float(e["t"]) for e in steps] + [ended]
    seconds = 0.0
    for earlier, later in itertools.pairwise([began, *(t for t in times if t > began)]):
        if later > fault.t and earlier < over:
            seconds += max(0.0, later - max(earlier, fault.t) - step_s)
    return seconds


def _gaps(events: Mapping[int, Sequence[Event]], faults: Sequence[Happened]) -> dict[str, float]:
    longest: dict[str, float] = {}
    for island, own in events.items():
        steps = [float(e["t"]) for e in own if e["event"] == "inner"]
        mine = [(f.t, _back(own, f)) for f in faults if f.island == island]
        for fault in faults:
            if fault.kind not in HARMLESS_TO_OTHERS or fault.island == island:
                continue
            for earlier, later in itertools.pairwise(steps):
                harmed = any(earlier < until and later > since for since, until in mine)
                if later >= fault.t and earlier <= fault.until and not harmed:
                    longest[fault.kind] = max(longest.get(fault.kind, 0.0), later - earlier)
    return longest


def _back(events: Sequence[Event], fault: Happened) -> float:
    """When its island has made an inner step again."""
    after = [float(e["t"]) for e in events if e["event"] == "inner" and e["t"] > fault.until]
    return after[0] if after else math.inf


def different_digests(events: Mapping[int, Sequence[Event]]) -> list[str]:
    """Versions of a fragment for which islands have written several digests."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for own in events.values():
        for event in own:
            if event["event"] == "round" and event["committed"]:
                found[event["fragment"], event["version"]].add(event["digest"])
    return [
        f"fragment {fragment}, version {version}: {len(digests)} digests"
        for (fragment, version), digests in sorted(found.items())
        if len(digests) > 1
    ]


def _bad_losses(events: Mapping[int, Sequence[Event]], faults: Sequence[Happened]) -> list[str]:
    """Losses that are no number, but on an island in which one was planted."""
    planted = {fault.island for fault in faults if fault.kind == "nan"}
    problems = []
    for island, own in events.items():
        bad = [e["step"] for e in own if e["event"] == "inner" and not _is_number(e.get("loss"))]
        if bad and island not in planted:
            problems.append(f"island {island}: {len(bad)} losses are no numbers, the first at step {bad[0]}")
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
