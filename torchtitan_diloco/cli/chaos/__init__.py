"""`torchtitan-diloco chaos`: a local run with faults by plan, and what they have cost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from torchtitan_diloco.cli.chaos import wire
from torchtitan_diloco.cli.chaos.levers import Chaos, run_folder
from torchtitan_diloco.cli.chaos.plan import Plan, load_plan
from torchtitan_diloco.cli.local.launch import Edges, launch
from torchtitan_diloco.cli.overrides import split_overrides
from torchtitan_diloco.cli.run import request_of
from torchtitan_diloco.cli.stop import stop_requests
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.data.run_audit import audit_run
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.observe.goodput import Goodput, measure
from torchtitan_diloco.observe.reading import EventTail

WITHOUT_END = 1_000_000
"""Restarts without progress: here islands die because they are killed."""


@dataclass(kw_only=True, slots=True)
class ChaosOptions:
    """Train on this machine as `run` does, have faults befall the islands, and say what that has cost.

    PLAN is a TOML file: duration_s, seed, and [[faults]] (at_s, kind, island, lasts_s) or [random] (count, kinds, lasts_s).
    An earlier run of this name is moved aside. Exit code 0: digests, ledger and losses are sound, 1: they are not, or an
    island could not go on, 2: wrong usage.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The run's TOML file."""

    plan: Path
    """What is to happen, and when."""

    islands: int | None = None
    """As of `run`."""

    ranks: str | None = None
    """As of `run`."""

    seed: int | None = None
    """Of the faults that are drawn, in place of the plan's."""


def main(argv: Sequence[str]) -> int:
    """The sub-command; returns the exit code. Raises UserError for wrong usage or configuration."""
    if argv[:1] == ["wire"]:
        return wire.main(argv[1:])
    own, overrides = split_overrides(argv)
    options = tyro.cli(ChaosOptions, args=own, prog="torchtitan-diloco chaos")
    # Every step leaves its event, or they could not be counted.
    forced = [
        *("--metrics.log_freq", "1"),
        *("--debug.inject_faults", "true"),
        *("--lighthouse.address", ""),
        *("--transport.urls", "[]"),
    ]
    request = request_of(
        options.file,
        [*overrides, *forced],
        islands=options.islands,
        ranks=options.ranks,
        max_restarts=WITHOUT_END,
        fresh=True,
    )
    config = request.config
    if config.semi_sync.method == "none":
        raise UserError('semi_sync.method = "none": islands that do not meet cannot harm one another')
    plan = load_plan(options.plan, request.ranks, seed=options.seed)
    if plan.needs_hub and config.transport.kind != "hub":
        raise UserError(
            f'--plan {options.plan}: cut and slow need transport.kind = "hub" (it is "{config.transport.kind}"): islands '
            "that dial one another have no wire that could be cut here"
        )
    folder = run_folder(config.job.dump_folder, config.job.name)
    edges = Edges(stop=stop_requests())
    chaos = Chaos(plan, folder, edges.stop)
    launch(request, Edges(stop=edges.stop, console=edges.console, companion=chaos))
    return _report(edges.console, config, plan, chaos, folder, list(request.ranks))


def _report(
    console: Console, config: RunConfig, plan: Plan, chaos: Chaos, folder: Path, islands: list[int]
) -> int:
    if chaos.began is None or chaos.ended is None:
        console.print("the run ended before every island had committed a slot: nothing was measured")
        return 1
    events = {i: list(EventTail(folder / f"island-{i}" / "events.jsonl").read()) for i in islands}
    every = {i: for_island(config, i).island.own_sync_every or config.semi_sync.sync_every for i in islands}
    found = measure(events, chaos.done, chaos.began, chaos.ended, config.semi_sync.fragments, every)
    found.problems += [f"ledger: {problem}" for problem in audit_run([folder]).problems]
    (folder / "chaos.json").write_text(json.dumps(found.to_json() | {"seed": plan.seed}, indent=1) + "\n")
    _print(console, found, chaos, plan)
    return 1 if found.problems or chaos.left_over else 0


def _print(console: Console, found: Goodput, chaos: Chaos, plan: Plan) -> None:
    table = Table("fault", "times", "islands stood still", "longest pause of the others", box=None)
    for kind, times in sorted(found.faults.items()):
        down, gap = found.downtime_s.get(kind), found.gap_s.get(kind)
        table.add_row(
            kind, str(times), "" if down is None else f"{down:.1f} s", "" if gap is None else f"{gap:.2f} s"
        )
    console.print(table)
    console.print(
        f"seed {plan.seed} | {found.wall_s:.0f} s | goodput {found.goodput:.1%}: {found.committed:,} tokens in committed "
        f"slots of {found.possible:,} without faults; {found.expected:.1%} is what the faults left by themselves (inner "
        f"steps that no slot holds: {found.uncommitted_s:.1f} island-seconds) | waited for exchanges: {found.stall_s:.1f} s"
    )
    if found.wall_s < plan.duration_s:
        console.print(
            f"the run was over {plan.duration_s - found.wall_s:.0f} s before the plan's end: raise training.steps"
        )
    if chaos.left_over:
        console.print(f"{chaos.left_over} faults found no moment: their islands were not back from others")
    for problem in found.problems:
        console.print(f"PROBLEM: {problem}")
    if not found.problems:
        console.print(
            "one digest for every version, a ledger without gaps or repetitions, all losses are numbers"
        )
