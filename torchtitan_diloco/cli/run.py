"""`torchtitan-diloco run`: all islands of one run on this machine, from one command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_diloco.cli.local.launch import Edges, Request, launch
from torchtitan_diloco.cli.local.supervisor import DRAIN_LIMIT_S
from torchtitan_diloco.cli.overrides import split_overrides
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.rules import WORLD, broken_relations
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """Train on this machine: a Lighthouse (or a hub), one torchrun per island, one live table.

    Any setting of FILE can be overridden with --section.key value. Ctrl-C drains: every island saves and leaves; the
    same command goes on from there. Exit code 0: done, 75: stopped early and resumable, 2: wrong usage, 1: failure.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The run's TOML file."""

    islands: int | None = None
    """Number of islands (default: the [[islands]] of FILE, or its semi_sync.num_islands)."""

    ranks: str | None = None
    """Processes per island: one number for all, or a comma list with one per island (default: nodes x ranks of its
    [[islands]] table, or 1)."""

    max_restarts: int = 3
    """How often an island that dies is started again without having made progress."""

    drain_limit: float = DRAIN_LIMIT_S
    """Seconds that islands may take to save and leave once the run is stopped; what has not left then is killed."""

    fresh: bool = False
    """Move an earlier run of this name aside and start anew."""


def parse_ranks(ranks: str, islands: int) -> list[int]:
    """Processes of each island. Raises UserError unless there is one positive number, or one per island."""
    words = [word.strip() for word in ranks.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--ranks {ranks}: give a number above 0, or a comma list such as 2,1")
    if len(words) not in (1, islands):
        raise UserError(
            f"--ranks {ranks}: {len(words)} numbers for {islands} islands; give one number, or one per island"
        )
    return [int(word) for word in words] * (islands if len(words) == 1 else 1)


def island_ranks(ranks: str | None, config: RunConfig) -> dict[int, int]:
    """Island id -> processes: from `--ranks` if given, else from the [[islands]] tables, else 1. As `parse_ranks`."""
    ids = sorted(table.id for table in config.islands) or list(range(config.semi_sync.num_islands))
    if ranks is not None:
        return dict(zip(ids, parse_ranks(ranks, len(ids)), strict=True))
    return dict.fromkeys(ids, 1) | {table.id: table.nodes * (table.ranks or 1) for table in config.islands}


def require_ranks(config: RunConfig, ranks: int) -> None:
    """Raises UserError where the settings of an island do not fit its number of processes."""
    broken = [f"{keys[0]}: {message}" for keys, message in broken_relations(config, ranks) if WORLD in keys]
    if broken:
        raise UserError("\n".join(f"island {config.island.id}: {line}" for line in broken))


def request_of(
    file: Path, overrides: Sequence[str], *, islands: int | None, ranks: str | None, max_restarts: int, fresh: bool,
    drain_limit_s: float = DRAIN_LIMIT_S,
) -> Request:  # fmt: skip
    """What `launch` needs, from the words on the command line. Raises UserError for wrong usage or configuration."""
    if islands is not None:
        if islands < 1:
            raise UserError(f"--islands {islands}: give a number above 0")
        if any(word.partition("=")[0].replace("-", "_") == "__semi_sync.num_islands" for word in overrides):
            raise UserError("--islands and --semi_sync.num_islands say the same thing: give one of them")
        overrides = ["--semi_sync.num_islands", str(islands), *overrides]
    for name in overrides:
        if name.partition("=")[0] == "--island.id":
            raise UserError("island.id: `run` numbers its islands itself, from 0; leave it out")
    config = load_config(file, overrides).with_model().config
    request = Request(
        config=config,
        ranks=island_ranks(ranks, config),
        max_restarts=max_restarts,
        fresh=fresh,
        drain_limit_s=drain_limit_s,
    )
    if config.semi_sync.method == "sync" and len(set(request.ranks.values())) > 1:
        raise UserError(
            f"--ranks {ranks or ', '.join(map(str, request.ranks.values()))}: all islands need the same number of "
            'processes with semi_sync.method = "sync"; give one number'
        )
    for island, number in request.ranks.items():
        require_ranks(for_island(config, island), number)
    return request


def main(argv: Sequence[str], edges: Edges | None = None) -> int:
    """The sub-command; returns the exit code. Raises UserError for wrong usage or configuration."""
    own, overrides = split_overrides(argv)
    options = tyro.cli(RunOptions, args=own, prog="torchtitan-diloco run")
    if options.max_restarts < 0:
        raise UserError(f"--max-restarts {options.max_restarts}: give 0 or more")
    if not options.drain_limit > 0:
        raise UserError(f"--drain-limit {options.drain_limit:g}: give a number of seconds above 0")
    request = request_of(
        options.file,
        overrides,
        islands=options.islands,
        ranks=options.ranks,
        max_restarts=options.max_restarts,
        fresh=options.fresh,
        drain_limit_s=options.drain_limit,
    )
    return launch(request, edges or Edges())
