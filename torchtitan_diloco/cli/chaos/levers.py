"""Brings the faults of a plan upon the islands of a local run, and writes down which and when."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchtitan_diloco.cli.chaos.kinds import EVERYBODY
from torchtitan_diloco.cli.chaos.plan import Fault, Plan
from torchtitan_diloco.cli.local.launch import RUN_ID
from torchtitan_diloco.cli.local.server import Kind, LocalServer
from torchtitan_diloco.cli.local.supervisor import Island, Phase, Supervisor
from torchtitan_diloco.cli.stop import StopRequests
from torchtitan_diloco.durable import open_lines
from torchtitan_diloco.observe.goodput import Happened
from torchtitan_diloco.observe.injection import INJECT

RECORD = "chaos.jsonl"


@dataclass(slots=True)
class _Active:
    happened: Happened
    lift: Callable[[], None]
    until: float


class Chaos:
    """The clock of the plan starts when every island has committed a slot. A fault that is due waits until its island trains
    and nothing else is the matter with it. ``done``: what has happened; ``began``, ``ended``: epoch seconds, None before."""

    def __init__(
        self, plan: Plan, folder: Path, stop: StopRequests, now: Callable[[], float] = time.time
    ) -> None:
        """folder: of the run."""
        self._plan, self._folder, self._stop, self._now = plan, folder, stop, now
        self.done: list[Happened] = []
        self.began: float | None = None
        self.ended: float | None = None
        self._due = list(plan.faults)
        self._active: list[_Active] = []
        self._wires: dict[int, LocalServer] = {}
        self._server: LocalServer | None = None

    @property
    def left_over(self) -> int:
        """Faults whose turn has not come."""
        return len(self._due)

    def route(self, island: int, address: str, folder: Path) -> str:
        if not self._plan.needs_hub:
            return address
        if island not in self._wires:
            command = [
                *("chaos", "wire", "--target", address),
                *("--slow-mbit", str(self._plan.slow_mbit)),
            ]
            # Each writes its log to the island's folder.
            kind = Kind("wire", command, "--bind", "transport.urls")
            self._wires[island] = LocalServer(folder / f"island-{island}", kind, (RUN_ID, "chaos"))
        return self._wires[island].address

    def begin(self, supervisor: Supervisor, server: LocalServer | None, tell: Callable[[str], None]) -> None:
        self._supervisor, self._server, self._tell = supervisor, server, tell

    def tick(self) -> None:
        now = self._now()
        for wire in self._wires.values():
            wire.keep_alive()
        islands = self._supervisor.islands
        if self.began is None:
            if not all(island.figures.committed for island in islands):
                return
            self.began = now
            self._tell(
                f"every island has committed a slot: {len(self._due)} faults in the next {self._plan.duration_s:g} s"
            )
        for active in [a for a in self._active if now >= a.until]:
            self._lift(active, now)
        if self.ended is None and (
            now >= self.began + self._plan.duration_s
            or self._supervisor.draining
            or any(island.phase.over for island in islands)
        ):
            self._end_plan(now)
        if self.ended is not None:
            return
        for fault in [f for f in self._due if now >= self.began + f.at_s]:
            if self._can_have(fault):
                self._due.remove(fault)
                self._begin(fault, now)

    def end(self) -> None:
        for wire in self._wires.values():
            wire.signal(signal.SIGCONT)
            wire.stop()

    # ---- one fault -------------------------------------------------------------------------------------------------

    def _island(self, fault: Fault) -> Island:
        return next(i for i in self._supervisor.islands if i.number == fault.island)

    def _can_have(self, fault: Fault) -> bool:
        if any(a.happened.island == fault.island for a in self._active):
            return False
        if fault.kind in EVERYBODY:
            return self._server is not None
        island = self._island(fault)
        back = all(
            island.figures.last_inner > h.until for h in self.done if h.island == fault.island and h.stops
        )
        return island.phase is Phase.RUNNING and back

    def _begin(self, fault: Fault, now: float) -> None:
        until = now + fault.lasts_s
        happened = Happened(now, fault.kind, fault.island, until)
        self.done.append(happened)
        lift = self._bring(fault)
        self._active.append(_Active(happened, lift, until))
        where = "" if fault.island is None else f" of island {fault.island}"
        self._tell(f"chaos: {fault.kind}{where}, {fault.lasts_s:.1f} s")
        self._write({"t": now, "kind": fault.kind, "island": fault.island, "until": until})

    def _bring(self, fault: Fault) -> Callable[[], None]:
        """Do it; returns what undoes it."""
        if fault.kind == "meeting":
            assert self._server is not None
            self._server.kill(fault.lasts_s)
            return _nothing
        island = self._island(fault)
        assert island.child is not None
        if fault.kind in ("cut", "slow"):
            wire = self._wires[island.number]
            on, off = (
                (signal.SIGSTOP, signal.SIGCONT) if fault.kind == "cut" else (signal.SIGUSR1, signal.SIGUSR2)
            )
            wire.signal(on)
            return lambda: wire.signal(off)
        if fault.kind == "nan":
            (island.folder / INJECT).write_text("nan\n")
            return _nothing
        workers = island.child.workers()
        if fault.kind == "kill":
            island.held_until = self._now() + fault.lasts_s
            island.child.kill_tree()
        elif fault.kind == "walltime":
            island.held_until, island.returns = self._now() + fault.lasts_s, True
            _to_each(workers, lambda process: process.terminate())
        elif fault.kind == "freeze":
            _to_each(workers, lambda process: process.suspend())
            return lambda: _to_each(workers, lambda process: process.resume())
        elif fault.kind == "disk_full":
            _to_each(workers, lambda process: _limit_files(process, 0))
            return lambda: _to_each(workers, lambda process: _limit_files(process, None))
        return _nothing

    def _lift(self, active: _Active, now: float) -> None:
        active.lift()
        self._active.remove(active)
        self._write({"t": now, "kind": active.happened.kind, "island": active.happened.island, "over": True})

    def _end_plan(self, now: float) -> None:
        """Whatever is still the matter ends, so that all can save and leave."""
        self.ended = now
        for active in list(self._active):
            self._lift(active, now)
        for island in self._supervisor.islands:
            island.held_until = now
        if not self._stop.count:
            self._stop.receive()

    def _write(self, entry: dict[str, object]) -> None:
        with open_lines(self._folder / RECORD) as file:
            file.write(json.dumps(entry) + "\n")


def _nothing() -> None:
    pass


def _to_each(processes: list[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            do(process)


def _limit_files(process: psutil.Process, size: int | None) -> None:
    """How long the process may make a file (prlimit(2), RLIMIT_FSIZE); None: as long as it could before."""
    _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (hard if size is None else size, hard))


def run_folder(dump_folder: str, name: str) -> Path:
    return Path(os.path.abspath(Path(dump_folder) / name))
