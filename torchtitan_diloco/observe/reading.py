"""What an island's trace says: follow its events.jsonl, read its state.json, add up the figures of a closing table.

Pure readers of the run folder, used while the run is live and afterwards; no torch.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventTail:
    """Follows one append-only JSON-lines file; every call of `read` yields what was added since the last one.

    A file that does not exist yet is empty. A line without its newline is left for the next call; a line that is no
    JSON object (torn by a kill -9 in the middle of a write) is counted in `torn` and skipped.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = 0
        self._offset = 0

    def read(self) -> Iterator[Event]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            event = _json_object(line)
            if event is None or not isinstance(event.get("event"), str):
                self.torn += bool(line.strip())
            else:
                yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandState:
    """One reading of `state.json`."""

    state: str
    """running | done | resume | fatal"""
    reason: str = ""
    step: int = 0
    incarnation: str = ""
    t: float = 0.0
    """Epoch seconds of the writing."""


def read_state(island_folder: str | Path) -> IslandState | None:
    """The island's `state.json`, or None where there is none or it is not readable as one."""
    try:
        raw = _json_object((Path(island_folder) / "state.json").read_bytes())
    except FileNotFoundError:
        return None
    if raw is None or not isinstance(raw.get("state"), str):
        return None
    return IslandState(
        state=raw["state"],
        reason=str(raw.get("reason") or ""),
        step=int(raw.get("step") or 0),
        incarnation=str(raw.get("incarnation") or ""),
        t=float(raw.get("t") or 0.0),
    )


@dataclass(slots=True)
class IslandFigures:
    """Running totals over the events of one island, all its incarnations together.

    Steps, tokens and losses are the island's own; a step that was trained twice (lost in a crash, then repeated)
    counts once, with its latest loss.
    """

    step: int = 0
    """The furthest step that it trained to, or ended with."""
    current_step: int = 0
    """Where it stands: behind `step` while steps lost in a crash are repeated, past it once it has taken another's state."""
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    tokens_per_second: float | None = None
    """Of the latest `inner` event, exchange stalls included."""
    slot: int | None = None
    """Number of the latest slot that committed or failed."""
    committed: int = 0
    failed: int = 0
    stall_s: float = 0.0
    inner_wall_s: float = 0.0
    """Wall time between the first and the last `inner` event of each incarnation, added up."""
    last_inner: float = 0.0
    """Epoch seconds of its latest `inner` event."""
    waiting: str = ""
    """For whom and why the island waits now; empty while it works."""
    error: str = ""
    ended: bool = False
    """Whether the latest incarnation has written `end`: trained to the last step and saved."""
    digests: dict[int, str] = field(default_factory=dict)
    """Committed slot -> anchor digest, the latest `KEPT_DIGESTS` of them."""
    taken_from: int | None = None
    """The island whose state it has taken and has not added a committed slot to since."""
    _counted: int = 0
    """Steps up to here are in `tokens`, or were not trained by this island but adopted from a peer."""
    _step_tokens: int = 0
    _inner_since: dict[str, tuple[float, float]] = field(default_factory=dict)

    KEPT_DIGESTS = 4096

    @property
    def stall_share(self) -> float | None:
        """Seconds stalled over wall seconds, 0 to 1; None before there are two `inner` events."""
        return self.stall_s / self.inner_wall_s if self.inner_wall_s > 0 else None

    @property
    def last_committed(self) -> int | None:
        return max(self.digests, default=None)

    def add(self, events: Iterable[Event]) -> bool:
        """Take the events in; True if they hold progress: a step or a committed slot not reached before."""
        progress = False
        for event in events:
            before = (self.step, self.last_committed or -1)
            kind = event["event"]
            if kind == "waiting":
                self.waiting = _waiting(event)
            elif kind == "inner":
                self._inner(event)
            elif kind == "drain":
                # Steps since the last `inner` event, of which there will be none for them.
                self._trained_to(int(event.get("step") or 0))
            elif kind == "round":
                self._round(event)
            elif kind in ("join", "heal"):
                self.current_step = int(event.get("step") or 0)
                self._counted = max(self._counted, self.current_step)
                self.taken_from = event.get("source", self.taken_from)
            elif kind == "error" and event.get("kind") != "fork":  # that ends nothing
                self.error = str(event.get("message") or event.get("kind") or "")
            elif kind == "start":
                self.ended, self.error = False, ""
            elif kind == "end":
                self.ended = True
                self.current_step = int(event.get("step") or self.current_step)
                self.step = max(self.step, self.current_step)
                self.tokens = int(event.get("tokens") or self.tokens)
            if kind in ("start", "join", "heal", "inner", "round", "leave", "end"):
                self.waiting = ""
            progress |= self.step > before[0] or (self.last_committed or -1) > before[1]
        return progress

    def _inner(self, event: Event) -> None:
        step, tokens, seconds = (
            int(event["step"]),
            int(event.get("tokens") or 0),
            float(event.get("seconds") or 0.0),
        )
        self._step_tokens = tokens
        self._trained_to(step)
        loss = event.get("loss")
        if isinstance(loss, int | float):
            self.first_loss = float(loss) if self.first_loss is None else self.first_loss
            self.last_loss = float(loss)
        if seconds > 0:
            self.tokens_per_second = tokens / seconds
        incarnation, now = str(event.get("incarnation")), float(event["t"])
        first, last = self._inner_since.get(incarnation, (now, now))
        self._inner_since[incarnation] = (first, now)
        self.last_inner = now
        self.inner_wall_s += max(0.0, now - last)

    def _trained_to(self, step: int) -> None:
        # One `inner` event stands for all steps since the one before it; its tokens are those of one step.
        self.tokens += self._step_tokens * max(0, step - self._counted)
        self._counted = max(self._counted, step)
        self.current_step = step
        self.step = max(self.step, step)

    def _round(self, event: Event) -> None:
        self.slot = int(event["round"])
        if str(event.get("incarnation")) in self._inner_since:  # else before the time that is counted
            self.stall_s += float(event.get("stall_s") or 0.0)
        if not event.get("committed"):
            self.failed += 1
            return
        if self.slot not in self.digests:
            self.committed += 1
        self.digests[self.slot] = str(event.get("digest") or "")
        self.taken_from = None
        while len(self.digests) > self.KEPT_DIGESTS:
            del self.digests[min(self.digests)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The last slot whose anchor several islands hold or have held, and whether it is the same."""

    slot: int | None
    """None where there is no such slot (or none has a digest, as in gossip)."""
    digests: Mapping[int, str]
    """Island -> digest, of the islands that have this slot."""

    @property
    def equal(self) -> bool:
        return len(set(self.digests.values())) <= 1


def anchors(figures: Mapping[int, IslandFigures]) -> dict[int, dict[int, str]]:
    """Island -> slot -> digest: of the slots that it committed, and of the last one where it ended by taking that state.

    There is no event of its own for the latter; a heal refuses bits that do not match the digest of where they come from.
    """
    return {
        island: own.digests | _last(_origin(island, figures)) if own.ended else own.digests
        for island, own in figures.items()
    }


def _origin(island: int, figures: Mapping[int, IslandFigures]) -> IslandFigures:
    """The island whose committed slot an ended island's anchor comes from, over however many heals."""
    passed = {island}
    while figures[island].ended:
        source = figures[island].taken_from
        if source is None or source in passed or source not in figures:
            break
        passed.add(source)
        island = source
    return figures[island]


def _last(figures: IslandFigures) -> dict[int, str]:
    last = figures.last_committed
    return {} if last is None else {last: figures.digests[last]}


def anchor_agreement(figures: Mapping[int, IslandFigures]) -> Agreement:
    """Compare anchors at the last slot which every island that has any has.

    Where one island died early and the kept digests no longer overlap, the last slot common to at least two counts.
    """
    held = {i: {slot: d for slot, d in own.items() if d} for i, own in anchors(figures).items()}
    held = {i: digests for i, digests in held.items() if digests}
    if len(held) < 2:
        return Agreement(None, {})
    count: dict[int, int] = {}
    for digests in held.values():
        for slot in digests:
            count[slot] = count.get(slot, 0) + 1
    common = [s for s, n in count.items() if n == len(held)] or [s for s, n in count.items() if n > 1]
    if not common:
        return Agreement(None, {})
    slot = max(common)
    return Agreement(slot, {i: digests[slot] for i, digests in held.items() if slot in digests})


def read_island(island_folder: str | Path) -> IslandFigures:
    """The figures of everything an island has written so far."""
    figures = IslandFigures()
    figures.add(EventTail(Path(island_folder) / "events.jsonl").read())
    return figures


def last_checkpoint(folder: str | Path) -> int | None:
    """Step of the newest complete checkpoint in a checkpoint folder; one that was broken off has no ``.metadata``."""
    steps = (
        path.name.removeprefix("step-")
        for path in Path(folder).glob("step-*")
        if (path / ".metadata").is_file()
    )
    return max((int(step) for step in steps if step.isdigit()), default=None)


def _waiting(event: Event) -> str:
    whom, why = (
        event.get("for"),
        str(event.get("why") or "").partition(";")[0],
    )  # addresses and numbers come after it
    names = ", ".join(map(str, whom)) if isinstance(whom, list) else str(whom or "")
    if isinstance(whom, list) and whom:
        names = f"island{'s' * (len(whom) > 1)} {names}"
    return f"{names} ({why})" if names and why else names or why


def _json_object(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
