"""`torchtitan-diloco preflight`: what stands between an island and its run, before it takes GPUs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchtitan_diloco.cli.overrides import split_overrides
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.preflight.network import network_rows
from torchtitan_diloco.preflight.rows import Row

WIDTH = 140
"""Columns of the table in a file, where rich would take 80 and cut addresses."""
STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}
WAY = {"out": "out ->", "in": "<- in", "here": "here"}


@dataclass(kw_only=True, slots=True)
class PreflightOptions:
    """Try out the network of one island, on the node where it will run: what it dials, and what has to reach it.

    Takes at most ten seconds. Exit code 0: nothing failed, 2: something did, and the table says what and the remedy.
    Any setting of FILE can be overridden with --section.key value.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The run's TOML file."""

    island: int | None = None
    """Which island this is (default: island.id of FILE)."""

    wait: float = 0.0
    """Seconds that the preflights of other islands are waited for, beyond the first few."""


def main(argv: Sequence[str]) -> int:
    """The sub-command; returns the exit code. Raises UserError for wrong usage or configuration."""
    own, overrides = split_overrides(argv)
    options = tyro.cli(PreflightOptions, args=own, prog="torchtitan-diloco preflight")
    if not 0 <= options.wait < 86400:
        raise UserError(f"--wait {options.wait:g}: give seconds from 0 to a day")
    if any(word.partition("=")[0] == "--island.id" for word in overrides):
        raise UserError("island.id: `preflight` takes --island N instead")
    run = load_config(options.file, overrides).config
    config = island_of(run, options.island)
    rows = network_rows(config, run, options.wait)
    show(rows, Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDTH))
    return 2 if any(row.outcome == "fail" for row in rows) else 0


def island_of(run: RunConfig, number: int | None) -> RunConfig:
    """The configuration of the island that was asked for. Raises UserError."""
    ids = sorted(table.id for table in run.islands)
    if number is None:
        if ids:
            raise UserError(f"--island: say which of the [[islands]] this is ({', '.join(map(str, ids))})")
        number = run.island.id
    if not ids and number not in range(run.semi_sync.num_islands):
        last = run.semi_sync.num_islands - 1
        raise UserError(f"--island {number}: semi_sync.num_islands has islands 0 to {last}")
    if ids and number not in ids:
        there = f"; there are {', '.join(map(str, ids))}"
        raise UserError(f"--island {number}: there is no such island{there}")
    return for_island(run, number)


def show(rows: Sequence[Row], console: Console) -> None:
    """A table, and below it, unbroken, what is to be done."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("", "what", "way", "where", "seen"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        mark = Text(row.outcome, style=STYLE[row.outcome])
        table.add_row(mark, Text(row.name), WAY[row.way], Text(row.place), Text(row.seen))
    console.print(table)
    for row in rows:
        if row.outcome != "ok" and row.remedy:
            line = f"{row.outcome}: {row.name} ({WAY[row.way]} {row.place}): {row.seen}; {row.remedy}"
            console.print(Text(line, style=STYLE[row.outcome]), soft_wrap=True)
    failed = sum(row.outcome == "fail" for row in rows)
    console.print(f"{failed} of {len(rows)} failed" if failed else "nothing failed")
