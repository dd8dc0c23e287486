"""One local run from its resolved configuration to its exit code."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console

from torchtitan_diloco.cli import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from torchtitan_diloco.cli.hub_folder import folder_of, set_aside
from torchtitan_diloco.cli.local.checks import require_free_port, require_full_batches
from torchtitan_diloco.cli.local.command import (
    INCARNATION,
    RUN_ID,
    Launch,
    torchrun_command,
    trainer_environment,
)
from torchtitan_diloco.cli.local.earlier import Decision, Plan, decide, require_same_data
from torchtitan_diloco.cli.local.folder import CONFIG, DataIdentity, RunFolder, run_record
from torchtitan_diloco.cli.local.meeting import meeting_place
from torchtitan_diloco.cli.local.processes import Child, sweep
from torchtitan_diloco.cli.local.server import LocalServer, is_loopback
from torchtitan_diloco.cli.local.supervisor import DRAIN_LIMIT_S, Island, Phase, Supervisor
from torchtitan_diloco.cli.local.table import View, make_console, print_closing, say
from torchtitan_diloco.cli.stop import StopRequests, stop_requests
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.load import to_toml
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.tokenizer import tokenizer_digest
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.observe.reading import anchor_agreement
from torchtitan_diloco.outer.slots import own_steps
from torchtitan_diloco.process import adopt_orphans


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for."""

    config: RunConfig
    ranks: dict[int, int]
    """Island id -> processes, in order."""
    max_restarts: int
    fresh: bool
    drain_limit_s: float = DRAIN_LIMIT_S


def prepare_data(config: RunConfig, ranks: dict[int, int]) -> DataIdentity:
    """Prepare every source that is not there yet, those of single islands included, before islands could race for it.

    ranks: island id -> processes. Raises UserError, also where the corpora do not fill a batch.
    """
    from torchtitan_diloco.data.corpus_size import require_vocabulary
    from torchtitan_diloco.data.samples import open_samples

    tokenizer = tokenizer_digest(config.model.hf_assets_path)
    manifests: dict[str, str] = {}  # path -> digest
    for number in ranks:
        view = for_island(config, number)
        samples = [
            open_samples(source, view.model.hf_assets_path, view.training.seq_len)
            for source in view.data.sources
        ]
        manifests |= {source.path: s.digest for source, s in zip(view.data.sources, samples, strict=True)}
        for source, opened in zip(view.data.sources, samples, strict=True):
            # Where the size is not written, only TorchTitan knows it, whose import takes seconds.
            require_vocabulary(
                path=source.path, needed=opened.vocab_size, size=view.model.vocab_size, written=True
            )
        if samples:
            paths = ", ".join(source.path for source in view.data.sources)
            require_full_batches(view, [ranks[number]], sum(map(len, samples)), paths)
    return DataIdentity(manifests=list(manifests.values()), tokenizer=tokenizer)


class Companion(Protocol):
    """Goes along with a run and has its hands on it. All calls come from the launcher's main thread."""

    def route(self, island: int, address: str, folder: Path) -> str:
        """The address of what all meet at as the island is told it, at each of its starts."""
        ...

    def begin(self, supervisor: Supervisor, server: LocalServer | None, tell: Callable[[str], None]) -> None:
        """Before the first island is started. server: of our own, if there is one. tell: takes words for people."""
        ...

    def tick(self) -> None:
        """Some ten times a second."""
        ...

    def end(self) -> None:
        """No island runs any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Where the launcher meets what it does not own; tests put other things there."""

    command: Callable[[Launch], list[str]] = torchrun_command
    prepare: Callable[[RunConfig, dict[int, int]], DataIdentity] = prepare_data
    console: Console = field(default_factory=make_console)
    stop: StopRequests = field(default_factory=stop_requests)
    companion: Companion | None = None


def launch(request: Request, edges: Edges) -> int:
    """Run all islands to their end and return the exit code.

    Raises UserError for what the user can put right: before anything was started, and nothing is left behind then; or
    with the reason that an island gave for its end. Raises KeyboardInterrupt for a stop signal before anything was started,
    with nothing left behind; a later one drains the run.
    """
    config, stop = request.config, edges.stop
    stop.check()
    require_free_port(config)
    meeting = meeting_place(config)
    if meeting is not None:
        meeting.check()
    folder = RunFolder(Path(config.job.dump_folder) / config.job.name)
    try:
        decision = decide(folder, config, fresh=request.fresh)
        with stop.interrupting():
            data = edges.prepare(config, request.ranks)
        if decision.plan is Plan.CONTINUE and decision.earlier is not None:
            require_same_data(decision.earlier, data)
    except BaseException:
        folder.abandon()
        raise
    try:
        run_id = _settle(folder, request, decision, data, edges.console)
        return _supervise(folder.path, request, run_id, edges)
    finally:
        sweep()
        folder.close()


def _settle(
    folder: RunFolder, request: Request, decision: Decision, data: DataIdentity, console: Console
) -> str:
    """Make the folder ready, say what becomes of an earlier run, and return the run's id."""
    config = request.config
    if decision.plan is Plan.ASIDE:
        say(console, f"{decision.why}; moved aside to {folder.move_aside()}, starting anew")
    elif decision.plan is Plan.REPLACE:
        folder.clear()
        say(console, f"{decision.why}; replaced")
    elif decision.plan is Plan.CONTINUE:
        say(console, decision.why)
    config_text = to_toml(config)
    record = run_record(
        name=config.job.name,
        config_text=config_text,
        data=data,
        ranks=list(request.ranks.values()),
        earlier=decision.earlier if decision.plan is Plan.CONTINUE else None,
        now=time.time(),
    )
    if word := _settle_hub(config, str(record["run_id"]), decision):
        say(console, word)
    folder.write(config_text, record)
    return str(record["run_id"])


def _settle_hub(config: RunConfig, run_id: str, decision: Decision) -> str:
    """What an earlier run's hub has left outside of the run folder must not become this run's. Returns words for people."""
    meeting = meeting_place(config)
    if meeting is None or meeting.name != "hub":
        return ""
    if meeting.address:
        if decision.plan is not Plan.ASIDE:
            return ""
        return (
            f"the hub at {meeting.address} (transport.urls) knows the run by its name, {config.job.name}: if it has state of "
            "the earlier one, this one goes on from that; give another --job.name, or start the hub with an empty syncer.dir"
        )
    known = {run_id, config.job.name} if decision.plan is Plan.CONTINUE else {run_id}
    return set_aside(folder_of(config), known, time.time())


def _supervise(folder: Path, request: Request, run_id: str, edges: Edges) -> int:
    config, console, companion = request.config, edges.console, edges.companion
    adopt_orphans()
    server, address = None, ""
    meeting = meeting_place(config)
    if meeting is not None:
        address = meeting.address
        if not address:
            server = LocalServer(folder, meeting.kind(folder), (RUN_ID, run_id))
            address = server.address
        elif meeting.name == "hub":
            run_id = config.job.name  # one that serves others as well knows the run by its name

    def start(island: Island) -> Child:
        own = companion.route(island.number, address, folder) if companion is not None else address
        incarnation = Launch(
            island=island.number,
            ranks=island.ranks,
            incarnation=island.incarnation,
            run_id=run_id,
            config_file=folder / CONFIG,
            meeting=(f"--{meeting.setting}", own) if meeting is not None else (),
        )
        environment = trainer_environment(
            incarnation,
            os.environ,
            total_ranks=sum(request.ranks.values()),
            loopback_only=not address or is_loopback(address),
        )
        return Child(
            edges.command(incarnation),
            environment=environment,
            log=island.folder / "logs" / f"{island.incarnation}.log",
            mark=(INCARNATION, island.incarnation),
        )

    islands = [_island(config, i, ranks, folder / f"island-{i}") for i, ranks in request.ranks.items()]
    header = (
        f"run folder {folder} | {f'{meeting.name} {address}' if meeting is not None else 'no Lighthouse'}"
    )
    with View(console, islands, header=header, steps=_last_steps(config, request.ranks)) as view:

        def each_tick() -> None:
            if server is not None and (news := server.keep_alive()):
                view.tell(news)
            if companion is not None:
                companion.tick()
            view.refresh()

        supervisor = Supervisor(
            islands,
            start=start,
            max_restarts=request.max_restarts,
            stop=edges.stop,
            tell=view.tell,
            each_tick=each_tick,
            drain_limit_s=request.drain_limit_s,
        )
        try:
            if companion is not None:
                companion.begin(supervisor, server, view.tell)
            supervisor.run()
        finally:
            supervisor.kill()
            if companion is not None:
                companion.end()
            unsaved = server.stop() if server is not None else None
    agreement = anchor_agreement({island.number: island.figures for island in islands})
    print_closing(console, islands, agreement, folder)
    if unsaved:
        say(console, unsaved)
    for island in islands:
        if island.phase is Phase.FATAL and island.reason:
            # An island that knows its end gives the reason, and the reason is the user's to put right.
            raise UserError(f"island {island.number}: {island.reason}")
    return _exit_code(supervisor, equal=agreement.equal)


def _island(config: RunConfig, number: int, ranks: int, folder: Path) -> Island:
    return Island(number, ranks, folder, folder / for_island(config, number).checkpoint.folder)


def _last_steps(config: RunConfig, ranks: Mapping[int, int]) -> dict[int, int]:
    """Of each island, inner steps of its own in the whole run."""
    steps, every = config.training.steps, config.semi_sync.sync_every
    if config.semi_sync.method == "none":
        return dict.fromkeys(ranks, steps)
    return {i: own_steps(steps, every, for_island(config, i).island.own_sync_every) for i in ranks}


def _exit_code(supervisor: Supervisor, *, equal: bool) -> int:
    phases = {island.phase for island in supervisor.islands}
    if phases & {Phase.FATAL, Phase.FAILED} or supervisor.killed or not equal:
        return EXIT_FAILED
    if phases == {Phase.DONE}:
        return EXIT_DONE
    # A run goes on from the checkpoint of any island; from none, all that was trained is lost.
    lost = any(island.lost for island in supervisor.islands)
    saved = any(island.saved is not None for island in supervisor.islands)
    return EXIT_FAILED if lost and not saved else EXIT_RESUMABLE
