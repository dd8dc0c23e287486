"""The [[islands]] tables: one layer of settings each, over those that all islands share."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.config.deferred import Deferred
from torchtitan_diloco.config.fields import kinds, put
from torchtitan_diloco.config.layers import Layer, Where
from torchtitan_diloco.config.names import unknown_item_key
from torchtitan_diloco.config.problems import Problems
from torchtitan_diloco.config.reader import Reader, dotted
from torchtitan_diloco.config.schema import IslandTable, RunConfig
from torchtitan_diloco.config.shared import OWN_KEY, why_shared
from torchtitan_diloco.config.toml_lines import Path as KeyPath
from torchtitan_diloco.config.values import describe

KEY = "islands"


@dataclass(slots=True)
class Island:
    """One table: what it says of itself, and its settings."""

    table: IslandTable
    layer: Layer
    where: Where | None
    """Where the table begins."""
    notes: list[str] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)

    def world(self) -> int | None:
        """Processes of the island; None where the table does not say."""
        return None if self.table.ranks is None else self.table.nodes * self.table.ranks


def read_islands(
    problems: Problems, written: Any, lines: dict[KeyPath, int], otherwise: Where | None = None
) -> list[Island]:
    """All tables in order, as far as they could be read; what is wrong with them is reported."""
    if not isinstance(written, list):
        got = describe(written)
        problems.add(
            lines.get((KEY,), otherwise), KEY, f"must be an array of tables, written [[islands]], got {got}"
        )
        return []
    found = []
    taken: set[int] = set()
    nameless: list[IslandTable] = []
    for i, entry in enumerate(written):
        root: KeyPath = (KEY, i)
        layer = Layer()
        reader = Reader(problems, layer, lines, otherwise=otherwise, root=root, refusal=why_shared)
        values = None
        if isinstance(entry, dict):
            own = {name: value for name, value in entry.items() if name in kinds(IslandTable)}
            typos = {name: _meant(name, value, root) for name, value in entry.items() if name not in own}
            for name, message in typos.items():
                if message:
                    reader.problem((*root, name), message)
            reader.read({name: entry[name] for name, message in typos.items() if not message})
            values = reader.fields(IslandTable, own, root)
        else:
            reader.problem(root, f"must be a table, written [[islands]], got {describe(entry)}")
        table = IslandTable(**(values or {"id": 0}), settings=layer.values)
        if values is None:
            nameless.append(table)
        else:
            taken.add(table.id)
        found.append(Island(table, layer, reader.at(root), reader.notes, reader.deferred))
    # Something must stand in place of a table without an id, or those after it would be called by its number.
    free = (number for number in range(len(found)) if number not in taken)
    for table, number in zip(nameless, free, strict=False):
        table.id = number
    _check(problems, found)
    return found


def _meant(name: str, value: Any, root: KeyPath) -> str:
    """What to say of a key that is near one of the table's own, which are more likely meant than the run's."""
    if name in kinds(RunConfig) or isinstance(value, dict):
        return ""
    message = unknown_item_key(name, dotted(root), IslandTable)
    return message if "did you mean" in message else ""


def for_island(config: RunConfig, number: int) -> RunConfig:
    """The configuration of one island of a run, from that of the run as a whole. KeyError if there is no such table."""
    own = deepcopy(config)
    own.island.id = number
    if config.islands:
        table = {table.id: table for table in config.islands}[number]
        own.island.name = table.name or own.island.name
        for key, value in table.settings.items():
            put(own, OWN_KEY.get(key, key), deepcopy(value))
    return own


def _check(problems: Problems, islands: list[Island]) -> None:
    first: dict[int, str] = {}
    for i, island in enumerate(islands):
        key, where, number = f"{KEY}[{i}].id", island.layer.where.get("id"), island.table.id
        if number in first:
            problems.add(
                where, key, f"({number}) is already that of {first[number]}; give each island its own"
            )
        elif number >= len(islands):
            problems.add(
                where,
                key,
                f"({number}) must be below the number of [[islands]] tables ({len(islands)}): ids count from 0",
            )
        first.setdefault(number, f"{KEY}[{i}]")
        if number < 0:
            island.layer.bad.add("island.id")  # said once, of the table
