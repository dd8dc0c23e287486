"""Schedules of faults as plain values: drawn from a seed, run, and made smaller while they still fail."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tests.exhaustive.exchange.simulation import FP32, LOSSY, USUAL_S, Simulation
from torchtitan_diloco.exchange.memory import Boundary, Fate

KINDS = (
    "drop",
    "delay",
    "duplicate",
    "sender crashes before",
    "sender crashes after",
    "receiver crashes before",
    "receiver crashes after",
)
MOST_EVENTS = 5_000  # five times what any schedule has been seen to take


@dataclass(frozen=True)
class Fault:
    """What happens to one message. seconds: how late it, or its duplicate, is."""

    kind: str
    seconds: float = 3.0


@dataclass(frozen=True)
class Schedule:
    """faults: by the number of the message. seed: of all times between 0 and ``USUAL_S``, and of the islands' own pace."""

    islands: int
    slots: int
    fragments: int = 1
    overlap: int = 0
    faults: Mapping[int, Fault] = field(default_factory=dict)
    seed: int = 0
    more: int = 0
    lossy: bool = False

    def simulation(self, note: Callable[[str], None] = lambda line: None) -> Simulation:
        """note: is told each fault that happens."""
        rng = random.Random(self.seed)

        def script(boundary: Boundary) -> Fate:
            usual = rng.uniform(0.001, 0.8 * USUAL_S)
            fault = self.faults.get(boundary.number)
            if fault is None:
                return Fate(delays=(usual,))
            what = type(boundary.message).__name__ if boundary.message else "bulk"
            note(
                f"at {simulation.net.now:.2f} s, message {boundary.number}: {fault.kind}; {what} of slot "
                f"{boundary.slot}, island {boundary.sender} to {boundary.receiver}"
            )
            if fault.kind == "receiver crashes after":
                simulation.net.at(usual + 1e-6, partial(simulation.net.crash, boundary.receiver))
                simulation.disturbed(usual)
            return {
                "drop": Fate(delays=()),
                "delay": Fate(delays=(fault.seconds,)),
                "duplicate": Fate(delays=(usual, fault.seconds)),
                "sender crashes before": Fate(crash=(boundary.sender,), crash_first=True),
                "sender crashes after": Fate(delays=(usual,), crash=(boundary.sender,)),
                "receiver crashes before": Fate(delays=(usual,), crash=(boundary.receiver,)),
                "receiver crashes after": Fate(delays=(usual,)),
            }[fault.kind]

        codec = LOSSY if self.lossy else FP32
        simulation = Simulation(
            self.islands, self.slots, self.seed, script, self.fragments, self.overlap, self.more, codec
        )
        return simulation

    def run(self, note: Callable[[str], None] = lambda line: None) -> Simulation:
        """Raises AssertionError where the protocol breaks a promise, and whatever else it raises."""
        simulation = self.simulation(note)
        simulation.run(MOST_EVENTS)
        simulation.check_progress()
        return simulation


BEHIND_AND_SENDING = Schedule(
    2,
    8,
    fragments=4,
    overlap=3,
    faults={3: Fault("receiver crashes after"), 35: Fault("receiver crashes before")},
    seed=38995,
)
"""The smallest found in which an island offers later slots although it is behind in one, which it has to offer again."""


ANSWER_OF_THE_DEAD = Schedule(
    3,
    3,
    fragments=4,
    overlap=3,
    faults={
        28: Fault("receiver crashes before", 7.362509043676542),
        47: Fault("sender crashes after", 7.777330347088175),
        64: Fault("delay", 4.170798416496121),
        77: Fault("receiver crashes before", 5.578509095196658),
    },
    seed=46266,
    more=2,
)
"""The smallest found in which an island is told that it is behind by one that is gone, with what that had committed."""


def drawn(seed: int) -> Schedule:
    """2 or 3 islands, 1 to 4 fragments, 0 to 3 slots of overlap, 1 to 5 faults in the first six slots or so."""
    rng = random.Random(seed)
    islands, fragments = rng.choice([2, 3]), rng.randint(1, 4)
    messages = 3 * islands * (islands - 1)  # of a slot without faults
    faults = _faults(rng, 6 * messages, 5)
    return Schedule(islands, 8, fragments, rng.randrange(fragments), faults, seed, more=2)


def _faults(rng: random.Random, messages: int, most: int) -> dict[int, Fault]:
    """From 1 to ``most`` faults among the first ``messages``."""
    numbers = rng.sample(range(messages), rng.randint(1, most))
    return {n: Fault(rng.choice(KINDS), rng.uniform(0.5, 8.0)) for n in sorted(numbers)}


def drawn_with_owners(seed: int) -> Schedule:
    """5 or 6 islands, so that slices have owners, and a codec that loses something; a little shorter, as it takes longer."""
    rng = random.Random(seed)
    islands, fragments = rng.choice([5, 6]), rng.randint(1, 3)
    messages = 4 * islands * (islands - 1)  # of a slot without faults
    faults = _faults(rng, 4 * messages, 6)
    return Schedule(islands, 5, fragments, rng.randrange(fragments), faults, seed, more=1, lossy=True)


class Runnable(Protocol):
    def run(self, note: Callable[[str], None] = ...) -> object: ...


R = TypeVar("R", bound=Runnable)
S = TypeVar("S", bound=Any)  # a dataclass with islands, fragments, overlap and slots


def error_of(schedule: Runnable) -> Exception | None:
    try:
        schedule.run()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is to be made smaller
        return error
    return None


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one thing less, the most wanted first."""
    for number in schedule.faults:
        yield replace(schedule, faults={n: f for n, f in schedule.faults.items() if n != number})
    if schedule.more:
        yield replace(schedule, more=schedule.more - 1)
    yield from less_of(schedule, 2)


def less_of(schedule: S, least_islands: int) -> Iterator[S]:
    """With one island, fragment, slot of overlap or slot less."""
    if schedule.islands > least_islands:
        yield replace(schedule, islands=schedule.islands - 1)
    if schedule.fragments > 1:
        fragments = schedule.fragments - 1
        yield replace(schedule, fragments=fragments, overlap=min(schedule.overlap, fragments - 1))
    if schedule.overlap:
        yield replace(schedule, overlap=schedule.overlap - 1)
    if schedule.slots > 1:
        yield replace(schedule, slots=schedule.slots - 1)


def shrunk(schedule: R, seconds: float = 60.0, less: Callable[[R], Iterator[R]] = smaller) -> R:  # type: ignore[assignment]
    """A schedule that fails as well, none of which ``less`` makes of it does; or as far as that goes in the time."""
    end = time.monotonic() + seconds
    candidates = less(schedule)
    while time.monotonic() < end:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if error_of(candidate) is not None:
            schedule, candidates = candidate, less(candidate)
    return schedule


def explain(schedule: R, less: Callable[[R], Iterator[R]] = smaller) -> str:  # type: ignore[assignment]
    """The smallest schedule found that fails like it, and its faults in words."""
    small = shrunk(schedule, less=less)
    happened: list[str] = []
    try:
        small.run(happened.append)
        error = "nothing, this time"
    except Exception as raised:  # noqa: BLE001
        error = f"{type(raised).__name__}: {raised}"
    return "\n  ".join([f"{small}.run() raises {error}", *happened])


def run_drawn(seed: int, draw: Callable[[int], Schedule] = drawn) -> Counter[str]:
    """Raises AssertionError that explains the schedule of that seed, if it fails. Counts what it went through."""
    schedule = draw(seed)
    try:
        simulation = schedule.run()
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{explain(schedule)}") from error
    last = max(simulation.calm, simulation.quiet)
    later = sum(at > last for at in simulation.offers.values())
    return Counter(schedules=1, slots=len(simulation.commits), afterwards=int(later >= simulation.fragments))
