"""What became of every sample of a run, from the ledgers of its islands: consumed once, lost, repeated, deferred.

The policy it holds a run against: a sample counts as consumed when the inner step it was part of belongs to a committed slot
(without slots, with method "none", when it was done), and that happens at most once per epoch. What was read but never
committed is read again by whoever has the shard next; where the run ended before that, or a window's weights were not finite,
the samples are *lost*. Samples of shards that no island of the last slot holds are *deferred*. The rest of an epoch is
*unread*: its turn has not come.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_diloco.data.streams import shard_size
from torchtitan_diloco.outer.shares import expand, split, stream

Entry = Mapping[str, Any]
BEFORE_THE_LEDGERS = -1
"""As island of what was consumed before the oldest entry that is left."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Positions [begin, end) of a stream, all in one epoch, and why."""

    stream: str
    begin: int
    end: int
    cause: str


@dataclass(slots=True)
class EpochReport:
    """Counts of one source in one epoch; they add up to ``samples``."""

    source: str
    path: str
    epoch: int
    samples: int
    consumed: int = 0
    repeated: int = 0
    lost: int = 0
    in_flight: int = 0
    deferred: int = 0
    unread: int = 0
    ranges: list[Lost] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What became of the samples.

    slot: the last committed one, -1 for none. slots: False where there are none, and ``slot`` is the inner step of the last
    checkpoint. empty: no island has entered the run yet. problems: in what the policy, or the account itself, is broken.
    """

    slot: int = -1
    slots: bool = True
    lineage: str = ""
    empty: bool = False
    epochs: list[EpochReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [begin, end) of one stream and their use: "consumed", "skipped" or "read"."""

    begin: int
    end: int
    use: str
    island: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """The entries of one island.

    reading: its ``reading.json``. running: it will go on and may commit what it has read.
    """

    island: int
    entries: Sequence[Entry]
    reading: Entry | None = None
    running: bool = False

    @property
    def slots(self) -> bool:
        starts = [entry for entry in self.entries if entry["kind"] == "start"]
        return not starts or bool(starts[-1].get("slots", True))


def audit(accounts: Sequence[Account]) -> Report:
    """The account of a run from those of its islands; any of them alone has all committed slots it was there for."""
    report = Report()
    sources = _sources(accounts, report)
    head = _head(accounts, report)
    if head is None:
        report.empty = True
        return report
    report.slots = any(account.slots for account in accounts)
    chain, spans = _follow(head, accounts, report)
    on_chain = {entry["lineage"] for entry in chain} | {head["lineage"]}
    _add_reads(spans, accounts, on_chain, report.lineage)
    held = _held(chain, accounts)
    for name, about in sorted(sources.items()):
        report.epochs += _source_report(name, about, spans, held, report)
    known = {split(name)[0] for name in spans} - sources.keys()
    report.problems += [f"source {name} is in the ledgers but described in none" for name in sorted(known)]
    return report


# ---- the history ---------------------------------------------------------------------------------------------------


def _sources(accounts: Sequence[Account], report: Report) -> dict[str, dict[str, Any]]:
    sources: dict[str, dict[str, Any]] = {}
    for account in accounts:
        for entry in (e for e in account.entries if e["kind"] == "start"):
            for name, about in entry["sources"].items():
                known = sources.setdefault(name, dict(about))
                if (known["samples"], known["shards"]) != (about["samples"], about["shards"]):
                    report.problems.append(
                        f"source {name} was cut in different ways: {known['samples']} samples in {known['shards']} "
                        f"shards and {about['samples']} in {about['shards']}"
                    )
    return sources


def _head(accounts: Sequence[Account], report: Report) -> Entry | None:
    """Where the run stands: the newest among the last places of all islands that are not part of another's history."""
    last = {
        account.island: next((e for e in reversed(account.entries) if e["kind"] in ("head", "commit")), None)
        for account in accounts
    }
    heads = {island: entry for island, entry in last.items() if entry is not None}
    if not heads:
        return None
    best = max(heads.values(), key=lambda e: (e["t"], e["tokens_total"], e["island"]))
    history = {best["lineage"], *(e["lineage"] for e in _back(best["lineage"], accounts))}
    for island, entry in sorted(heads.items()):
        ahead = [e for e in _back(entry["lineage"], accounts) if e["lineage"] not in history]
        if entry["lineage"] in history or not ahead:
            continue
        # An island that has committed on from here is the later one, whatever the clocks say.
        if any(e["parent"] == best["lineage"] for e in ahead):
            best, history = entry, history | {e["lineage"] for e in ahead}
        else:
            report.notes.append(
                f"island {island} stands on another history (slot {entry['slot']}); its {len(ahead)} slots since the "
                "fork are not counted"
            )
    return best


def _commits(accounts: Sequence[Account]) -> dict[str, Entry]:
    return {e["lineage"]: e for a in accounts for e in a.entries if e["kind"] == "commit"}


def _back(lineage: str, accounts: Sequence[Account]) -> list[Entry]:
    """The committed slots that led to ``lineage``, oldest first, as far back as the ledgers go."""
    commits = _commits(accounts)
    chain: list[Entry] = []
    while lineage in commits:
        chain.append(commits[lineage])
        lineage = commits[lineage]["parent"]
    return chain[::-1]


def _follow(
    head: Entry, accounts: Sequence[Account], report: Report
) -> tuple[list[Entry], dict[str, list[Span]]]:
    """The chain of committed slots, and what they consumed; every range must begin where the last one ended."""
    chain = _back(head["lineage"], accounts)
    spans: dict[str, list[Span]] = defaultdict(list)
    reached: dict[str, int] = {}
    root = chain[0]["parent"] if chain else head["lineage"]
    if root:
        bases = [e for a in accounts for e in a.entries if e["kind"] == "head" and e["lineage"] == root]
        if not bases:
            report.problems.append("the slots before the oldest entry are in no ledger that is left")
        for name, position in (bases[0]["positions"] if bases else {}).items():
            reached[name] = position
            spans[name].append(Span(0, position, "consumed", BEFORE_THE_LEDGERS))
        if bases:
            report.notes.append(
                f"the ledgers begin after slot {bases[0]['slot'] - 1}; what came before counts as consumed"
            )
    for entry in chain:
        for use, part in (("skipped", entry["skipped"]), ("consumed", entry["consumed"])):
            for island, streams in part.items():
                cause = f"the weights of island {island} were not finite at slot {entry['slot']}"
                for name, (begin, end) in streams.items():
                    if begin > reached.get(name, 0):
                        report.problems.append(
                            f"slot {entry['slot']}: stream {name} goes on at {begin}, but stood at {reached.get(name, 0)}"
                        )
                    spans[name].append(Span(begin, end, use, int(island), cause if use == "skipped" else ""))
                    reached[name] = max(reached.get(name, 0), end)
        report.slot = entry["slot"]
    report.slot = max(report.slot, head["slot"] - (head["kind"] == "head"))
    report.lineage = head["lineage"]
    return chain, spans


def _add_reads(
    spans: dict[str, list[Span]], accounts: Sequence[Account], on_chain: set[str], lineage: str
) -> None:
    """What was read without being committed, as far as the islands could write it down."""
    for account in accounts:
        for entry in account.entries:
            if entry["kind"] == "dropped":
                _add(spans, entry["streams"], account.island, entry["cause"])
            elif entry["kind"] == "commit" and entry["lineage"] not in on_chain:
                cause = f"{'slot' if account.slots else 'step'} {entry['slot']} belongs to a history that was not continued"
                for island, streams in [*entry["consumed"].items(), *entry["skipped"].items()]:
                    _add(spans, streams, int(island), cause)
        if account.reading is not None and not account.slots and account.reading["lineage"] == lineage:
            for name, (begin, end) in account.reading["streams"].items():
                spans[name].append(Span(begin, end, "consumed", account.island))
        elif account.reading is not None:
            going = account.running and account.reading["lineage"] == lineage
            cause = (
                "" if going else f"island {account.island} stopped or failed before its slot was committed"
            )
            _add(spans, account.reading["streams"], account.island, cause)


def _add(spans: dict[str, list[Span]], streams: Mapping[str, Sequence[int]], island: int, cause: str) -> None:
    for name, (begin, end) in streams.items():
        spans[name].append(Span(begin, end, "read", island, cause))


def _held(chain: Sequence[Entry], accounts: Sequence[Account]) -> set[str]:
    """Streams that an island of the last slot can read; before the first slot, that any island can."""
    if chain:
        all_holds = list(chain[-1]["members"].values())
    else:
        all_holds = [e["holds"] for a in accounts for e in a.entries if e["kind"] == "start"]
    return {stream(s, k) for holds in all_holds for s, ranges in holds.items() for k in expand(ranges)}


# ---- samples -------------------------------------------------------------------------------------------------------


def _source_report(
    name: str, about: Mapping[str, Any], spans: Mapping[str, list[Span]], held: set[str], report: Report
) -> list[EpochReport]:
    samples, shards = about["samples"], about["shards"]
    sizes = [shard_size(samples, shards, shard) for shard in range(shards)]
    last = [max((span.end for span in spans.get(stream(name, k), ())), default=0) for k in range(shards)]
    epochs = max([1, *(-(-end // size) for end, size in zip(last, sizes, strict=True) if size)])
    reports = [EpochReport(name, about["path"], epoch, samples) for epoch in range(epochs)]
    for shard, size in enumerate(sizes):
        key = stream(name, shard)
        if not size:  # more shards than samples
            if last[shard]:
                report.problems.append(f"stream {key}: was read up to {last[shard]}, but has no samples")
            continue
        borders = {epoch * size for epoch in range(epochs + 1)}
        for begin, end, covering in _pieces(spans.get(key, ()), borders):
            _count(reports[begin // size], key, begin, end, covering, key in held, report)
    return reports


def _pieces(spans: Iterable[Span], borders: set[int]) -> Iterable[tuple[int, int, list[Span]]]:
    """[0, last border) in pieces, each with the spans that cover the whole of it."""
    begins: dict[int, list[Span]] = defaultdict(list)
    points = set(borders)
    for span in spans:
        begins[span.begin].append(span)
        points |= {span.begin, span.end}
    covering: list[Span] = []
    ordered = sorted(points)
    for begin, end in itertools.pairwise(ordered):
        covering = [span for span in covering if span.end > begin] + [
            span for span in begins[begin] if span.end > begin
        ]
        yield begin, end, covering


def _count(
    row: EpochReport, key: str, begin: int, end: int, covering: list[Span], held: bool, report: Report
) -> None:
    number = end - begin
    uses = [span for span in covering if span.use == "consumed"]
    if len(uses) > 1:
        row.repeated += number
        who = ", ".join(str(span.island) for span in uses)
        report.problems.append(
            f"stream {key}: positions {begin} to {end} (epoch {row.epoch}) were consumed {len(uses)} times, "
            f"by islands {who}"
        )
    elif uses:
        row.consumed += number
    elif skipped := [span for span in covering if span.use == "skipped"]:
        row.lost += number
        row.ranges.append(Lost(key, begin, end, skipped[0].cause))
    elif any(not span.cause for span in covering):
        row.in_flight += number
    elif covering:
        row.lost += number
        row.ranges.append(Lost(key, begin, end, covering[-1].cause))
    elif held:
        row.unread += number
    else:
        row.deferred += number
