"""Keeps the islands of a local run going: start, bounded restart, drain, stop. It decides; the view speaks."""

import contextlib
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from torchtitan_diloco.cli.local.processes import Child
from torchtitan_diloco.cli.stop import StopRequests
from torchtitan_diloco.observe.reading import (
    EventTail,
    IslandFigures,
    IslandState,
    last_checkpoint,
    read_state,
)

TICK_S = 0.1
FIRST_RESTART_DELAY_S = 1.0
LONGEST_RESTART_DELAY_S = 30.0
FATAL_GRACE_S = 15.0
"""How long the other islands may take to save once the run is lost."""
DRAIN_LIMIT_S = 300.0
"""How long islands may take by default to finish a step, save and leave: a frozen rank would keep its island for ever."""


KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID (\d+)")
"""What torchrun says of a rank that a signal has ended (torch 2.14.1)."""


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    RESUME = "resume"
    """Saved its state and left before the end."""
    STOPPED = "stopped"
    """Ended by a stop before it could save; its last checkpoint counts, if it has one."""
    FAILED = "failed"
    """Out of restarts."""
    FATAL = "fatal"
    """Said itself that another start would end the same way."""

    @property
    def over(self) -> bool:
        return self not in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


@dataclass(slots=True)
class Island:
    """One island as the launcher knows it."""

    number: int
    ranks: int
    folder: Path
    checkpoints: Path | None = None
    """By default `folder`/checkpoint."""
    phase: Phase = Phase.STARTING
    incarnation: str = ""
    figures: IslandFigures = field(default_factory=IslandFigures)
    reason: str = ""
    restarts: int = 0
    failures: int = 0
    """Ends in a row without progress."""
    restart_at: float = 0.0
    launched_at: float = 0.0
    child: Child | None = None
    signalled: set[int] = field(default_factory=set)
    """Process ids that were told to drain."""
    held_until: float = 0.0
    """It is not started again before this time."""
    returns: bool = False
    """Whether it is started again once it has saved and left, as by a job that follows on one with a walltime."""
    tail: EventTail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = EventTail(self.folder / "events.jsonl")
        # What an earlier incarnation reached is history, not progress of this one.
        self.figures.add(self.tail.read())

    @property
    def saved(self) -> int | None:
        """Step of its newest checkpoint."""
        return last_checkpoint(self.checkpoints or self.folder / "checkpoint")

    @property
    def lost(self) -> bool:
        """Whether it has trained and another start would find nothing of it."""
        return self.figures.step > 0 and self.saved is None

    @property
    def remains(self) -> str:
        """A clause on what another start would find."""
        if self.saved is not None:
            return f"its checkpoint of step {self.saved} counts"
        return (
            "it has no checkpoint and would begin anew" if self.figures.step else "it has not made a step yet"
        )

    def state(self) -> IslandState | None:
        """What the present incarnation wrote into state.json; None while the file is from an earlier one."""
        state = read_state(self.folder)
        if state is None or (state.incarnation != self.incarnation and state.t < self.launched_at):
            return None
        return state


class Supervisor:
    """Runs islands to their end. All processes are started from the thread that calls `run`."""

    def __init__(
        self,
        islands: Sequence[Island],
        *,
        start: Callable[[Island], Child],
        max_restarts: int,
        stop: StopRequests,
        tell: Callable[[str], None],
        each_tick: Callable[[], None] = lambda: None,
        drain_limit_s: float = DRAIN_LIMIT_S,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`start` makes the child of one incarnation, `tell` takes words, `each_tick` runs every `TICK_S`."""
        self.islands = list(islands)
        self.draining = False
        self.killed = False
        self._start_child = start
        self._max_restarts = max_restarts
        self._stop = stop
        self._tell = tell
        self._each_tick = each_tick
        self._drain_limit_s = drain_limit_s
        self._now = now
        self._sleep = sleep
        self._drain_since = self._limit_s = 0.0
        self._given_up = False

    def run(self) -> None:
        """Return when every island is over."""
        for island in self.islands:
            if self._stop.count:
                island.phase = Phase.STOPPED
            else:
                self._start(island)
        while not all(island.phase.over for island in self.islands):
            self._obey()
            for island in self.islands:
                self._look_after(island)
            self._each_tick()
            self._sleep(TICK_S)

    def kill(self) -> None:
        """SIGKILL whatever still runs."""
        for island in self.islands:
            if island.child is not None:
                island.child.kill_tree()
            if not island.phase.over:
                island.phase = Phase.STOPPED

    def _obey(self) -> None:
        if self._stop.count and not self.draining:
            self._begin_to_drain(self._drain_limit_s)
            self._tell(
                f"stopping: each island finishes its step and saves, within {self._drain_limit_s:g} s (--drain-limit); "
                "press Ctrl-C again to kill them now"
            )
        fatal = next((i for i in self.islands if i.phase is Phase.FATAL), None)
        if fatal is not None and not self._given_up:
            self._given_up = True
            self._tell(
                f"island {fatal.number} cannot go on: {fatal.reason or 'no reason given'}; stopping the run"
            )
            self._begin_to_drain(FATAL_GRACE_S)
        late = self.draining and self._now() >= self._drain_since + self._limit_s
        if late or self._stop.count > 1:
            self.killed = True
            why = f" has not left within {self._limit_s:g} s:" if late else ""
            for island in self.islands:
                if not island.phase.over:
                    self._tell(f"island {island.number}{why} killed; {island.remains}")
            self.kill()
        elif self.draining:
            for island in self.islands:
                self._drain(island)

    def _begin_to_drain(self, limit_s: float) -> None:
        self.draining = True
        self._drain_since, self._limit_s = self._now(), limit_s

    def _drain(self, island: Island) -> None:
        """Signal the workers themselves: torchrun, when signalled, kills them 30 s later."""
        if island.phase is Phase.RESTARTING:
            island.phase = Phase.STOPPED
        if island.phase.over or island.child is None:
            return
        workers = island.child.workers()
        for worker in workers:
            if worker.pid not in island.signalled:
                island.signalled.add(worker.pid)
                # psutil refuses to signal a pid that was reused; a worker that has ended is what was wanted.
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()
        if not workers and not island.signalled:
            island.signalled.add(island.child.pid)
            island.child.signal_group(signal.SIGTERM)

    def _look_after(self, island: Island) -> None:
        if island.figures.add(island.tail.read()):
            island.failures = 0
        if island.phase.over:
            return
        if island.phase is Phase.RESTARTING:
            if self._now() >= max(island.restart_at, island.held_until):
                island.restarts += 1
                self._start(island)
            return
        assert island.child is not None
        code = island.child.poll()
        state = island.state()
        if code is not None:
            # It may have written between the look at its events and its end.
            if island.figures.add(island.tail.read()):
                island.failures = 0
            self._ended(island, code, island.state())
        elif state is not None and island.phase is Phase.STARTING:
            island.phase = Phase.RUNNING

    def _ended(self, island: Island, code: int, state: IslandState | None) -> None:
        assert island.child is not None
        island.child.kill_tree()
        said = state.state if state else ""
        island.reason = state.reason if state else ""
        if said == "fatal":
            island.phase = Phase.FATAL
        elif said == "done" or island.figures.ended:
            island.phase = Phase.DONE
            # Saved to the last step: dying while taking things down costs nothing, but is not kept quiet.
            blemish = f", then ended with {_ending(code)}, see {island.child.log}" if code else ""
            self._tell(f"island {island.number} is done at step {island.figures.step}{blemish}")
        elif said == "resume" and (code == 0 or self.draining):
            back = island.returns and not self.draining
            island.phase, island.returns = Phase.RESTARTING if back else Phase.RESUME, False
            step = state.step if state else 0
            if step and island.saved == step:
                self._tell(f"island {island.number} saved at step {step} and left")
            else:
                why = f" ({island.reason})" if island.reason else ""
                self._tell(
                    f"island {island.number} left at step {step} without saving{why}; {island.remains}"
                )
        elif self.draining:
            island.phase = Phase.STOPPED
            self._tell(f"island {island.number} ended with {_ending(code)} without saving; {island.remains}")
        else:
            self._failed(island, code)

    def _failed(self, island: Island, code: int) -> None:
        assert island.child is not None
        if self._now() < island.held_until:  # somebody has ended it on purpose
            island.phase = Phase.RESTARTING
            return
        island.failures += 1
        island.reason = f"ended with {_ending(code)}"
        tail = _cause(island)
        if island.failures > self._max_restarts:
            island.phase = Phase.FAILED
            self._tell(
                f"island {island.number} {island.reason}, {island.failures} times without progress: given up; {tail}"
            )
            return
        delay = min(LONGEST_RESTART_DELAY_S, FIRST_RESTART_DELAY_S * 2 ** (island.failures - 1))
        island.phase = Phase.RESTARTING
        island.restart_at = self._now() + delay
        self._tell(f"island {island.number} {island.reason}; starting it again in {delay:.0f} s; {tail}")

    def _start(self, island: Island) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._now()))
        island.incarnation = f"{stamp}-{secrets.token_hex(3)}"
        island.launched_at = self._now()
        island.signalled = set()
        island.figures.ended = False
        island.phase = Phase.STARTING
        island.child = self._start_child(island)


def _cause(island: Island) -> str:
    """Why it has ended, as far as that is known: in its own words, in torchrun's, or the end of its log."""
    assert island.child is not None
    if island.figures.error:
        return island.figures.error
    lines = island.child.log_tail()
    if killed := KILLED.search(lines):
        return f"a rank of it (process {killed[2]}) was ended by {killed[1]}; its log is {island.child.log}"
    return f"last lines of {island.child.log}:\n{lines}"


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
