"""Reads a TOML file and command-line overrides into a `RunConfig`, or says everything that is wrong with them."""

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli

from torchtitan_diloco.config.agreement import agreement, lockstep_differences
from torchtitan_diloco.config.deferred import Deferred
from torchtitan_diloco.config.dump import to_toml
from torchtitan_diloco.config.fault_tolerance import SECTION, read_fault_tolerance
from torchtitan_diloco.config.fields import items, keys
from torchtitan_diloco.config.islands import KEY, Island, read_islands
from torchtitan_diloco.config.layers import Layer, Where, combine, origin, place
from torchtitan_diloco.config.notes import notes
from torchtitan_diloco.config.overrides import parse_overrides, take_config_file
from torchtitan_diloco.config.problems import COMMAND_LINE, ConfigError, Problems
from torchtitan_diloco.config.reader import Reader
from torchtitan_diloco.config.resolved import Resolved
from torchtitan_diloco.config.rules import WORLD, broken_ranges, broken_relations
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.shared import OWN_KEY
from torchtitan_diloco.config.toml_lines import Path as KeyPath
from torchtitan_diloco.config.toml_lines import key_lines
from torchtitan_diloco.config.upstream import base_values, unknown_base, unknown_model
from torchtitan_diloco.config.values import WrongValue, parse_text

__all__ = ["ConfigError", "Resolved", "agreement", "load_config", "take_config_file", "to_toml"]

_ID, _COUNT = "island.id", "semi_sync.num_islands"
_SOURCES, _SHARED = "data.sources", "data.shared"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Load and check one file, with command-line settings on top.

    Of a file with [[islands]], ``--island.id N`` among the overrides picks the settings of island N. Values come from the
    command line, the island's table, the rest of the file, the function that job.base names, and the defaults, in this
    order. All islands of the file are checked.

    Args:
        path: TOML file. Paths inside it are kept as written, to be resolved against the working directory.
        overrides: Arguments such as ``["--training.steps", "10", "--debug.deterministic"]``; they win over the file.

    Raises:
        ConfigError: with all problems at once, one line each.
    """
    loader = _Loader(str(path))
    loader.read_file()
    loader.read_command_line(overrides)
    loader.settle_islands()
    loader.start_from_base()
    loader.check_rules()
    loader.problems.raise_if_any()
    layers = loader.layers(loader.picked)
    config = loader.config(layers)
    origins = {key: origin(key, layers, str(path)) for key in (*keys(), *(key for key, _ in items(config)))}
    return Resolved(config, origins, Path(path), loader.notes + notes(config, origins))


class _Loader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems = Problems(file)
        self.base, self.written, self.command = Layer(), Layer(), Layer()
        self.read = False
        self.islands: list[Island] = []
        self.picked: Island | None = None
        """The island that the command line names."""
        self.deferred: list[Deferred] = []
        self.renamed: dict[str, str] = {}
        self.notes: list[str] = []

    def layers(self, island: Island | None) -> list[Layer]:
        return [self.base, self.written, *([island.layer] if island else []), self.command]

    def config(self, layers: Sequence[Layer]) -> RunConfig:
        config = combine(layers)
        config.job.name = config.job.name or Path(self.file).stem
        config.islands = [deepcopy(island.table) for island in self.islands]
        return config

    # ---- the file

    def read_file(self) -> None:
        try:
            text = Path(self.file).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            self.problems.add(None, "", "is not UTF-8 text")
            return
        except (OSError, ValueError) as e:
            reason = os.strerror(e.errno).lower() if isinstance(e, OSError) and e.errno else str(e)
            self.problems.add(None, "", f"cannot be read: {reason}")
            return
        try:
            document = tomli.loads(text)
            lines = key_lines(text)
        except (ValueError, RecursionError) as e:
            self.problems.add_syntax_error(text, e)
            return
        self.read = True
        reader = Reader(self.problems, self.written, lines)
        reader.read({name: value for name, value in document.items() if name not in (KEY, SECTION)})
        if SECTION in document:
            read_fault_tolerance(reader, document[SECTION])
        self.deferred, self.renamed, self.notes = reader.deferred, reader.renamed, reader.notes
        if KEY in document:
            self.add_islands(document[KEY], lines)

    def add_islands(self, written: Any, lines: dict[KeyPath, int], otherwise: str | None = None) -> None:
        self.islands = read_islands(self.problems, written, lines, otherwise)
        layer = self.command if otherwise else self.written
        for i, island in enumerate(self.islands):
            layer.where |= {f"{KEY}[{i}].{key}": where for key, where in island.layer.where.items()}
            if island.where is not None:
                layer.where[f"{KEY}[{i}]"] = island.where
            self.notes += island.notes
        if self.islands and self.islands[0].where is not None:
            layer.where[KEY] = self.islands[0].where

    # ---- the command line

    def read_command_line(self, argv: Sequence[str]) -> None:
        reader = Reader(self.problems, self.command, {}, otherwise=COMMAND_LINE)
        for override in parse_overrides(argv):
            path = tuple(override.key.split("."))
            if override.mistake:
                reader.problem(path, override.mistake)
                continue
            try:
                value = parse_text(keys()[override.key], override.text)
            except WrongValue as e:
                self.command.where[override.key] = COMMAND_LINE
                reader.problem(path, str(e))
                continue
            if override.key == KEY:
                self.command.where[KEY] = COMMAND_LINE
                self.add_islands(value, {}, COMMAND_LINE)
            else:
                # What a parser of text returns has passed the check; None cannot pass it a second time.
                reader.value(override.key, path, "none" if value is None else value)
        self.notes += reader.notes

    # ---- islands and base

    def settle_islands(self) -> None:
        """Pick the island; give the run its number of islands; let the command line win over the tables."""
        if not self.islands:
            return
        if _ID in self.written.values:
            self.problems.add(
                self.written.where.get(_ID),
                _ID,
                "with [[islands]] the command line says which island this is (--island.id N); remove it",
            )
        wanted = self.command.values.get(_ID)
        self.picked = next((island for island in self.islands if island.table.id == wanted), None)
        if wanted is not None and self.picked is None:
            there = ", ".join(str(island.table.id) for island in self.islands)
            self.problems.add(
                COMMAND_LINE, _ID, f"no [[islands]] table has the id {wanted}; there are {there}"
            )
        count = len(self.islands)
        for layer in (self.written, self.command):
            if layer.values.get(_COUNT, count) != count:
                message = f"({layer.values[_COUNT]}) is not the number of [[islands]] tables ({count}); leave it out"
                self.problems.add(layer.where.get(_COUNT), _COUNT, message)
        if _COUNT not in self.written.values and _COUNT not in self.command.values:
            self.written.put(_COUNT, count, self.islands[0].where)
        in_tables = {own: key for key, own in OWN_KEY.items()}
        for key in (in_tables.get(key, key) for key in self.command.values):
            beaten = [island for island in self.islands if key in island.layer.values]
            for island in beaten:
                del island.layer.values[key]
            if beaten:
                ids = ", ".join(str(island.table.id) for island in beaten)
                self.notes.append(f"{key}: the command line wins over the [[islands]] tables of island {ids}")
        self.settle_shared_data()
        for island in self.islands:
            island.table.settings = dict(island.layer.values)
            for key in OWN_KEY.keys() & island.layer.values.keys():
                island.layer.put(OWN_KEY[key], island.layer.values.pop(key), island.layer.where.get(key))
            island.layer.put(_ID, island.table.id, island.where)
            if island.table.name:
                island.layer.put("island.name", island.table.name, island.layer.where.get("name"))

    def settle_shared_data(self) -> None:
        """Islands that name different corpora are not held to the same ones, unless the file says so."""
        if any(_SHARED in layer.values or _SHARED in layer.bad for layer in self.layers(None)):
            return
        first, *others = (self.paths(island) for island in self.islands)
        for island, paths in zip(self.islands[1:], others, strict=True):
            if paths != first:
                self.written.put(_SHARED, False, island.layer.where.get(_SOURCES, island.where))
                self.notes.append(
                    f"{_SHARED} is false, since the [[islands]] name different {_SOURCES}: each reads its own; where these "
                    f"are copies of the same corpora, {_SHARED} = true checks it"
                )
                return

    def paths(self, island: Island) -> list[str]:
        """Of an island's corpora."""
        said = [layer.values[_SOURCES] for layer in self.layers(island) if _SOURCES in layer.values]
        return sorted(source.path for source in said[-1]) if said else []

    def start_from_base(self) -> None:
        """Fill the lowest layer, and refuse a base or a model that TorchTitan does not have."""
        run = combine((self.written, self.command))
        layers = (self.written, self.command)
        if run.job.base:
            wrong = unknown_base(run.job.base)
            if wrong:
                self.problems.add(place("job.base", layers), "job.base", wrong)
            else:
                for key, value in base_values(run.job.base).items():
                    self.base.put(key, value, f"base {run.job.base}")
        run = combine((self.base, *layers))
        for key, message in unknown_model(run.model.name, run.model.flavor):
            if not self.bad(layers).intersection(("model.name", "model.flavor")):
                self.problems.add(place(key, layers), key, message)

    # ---- rules

    def check_rules(self) -> None:
        """Check every island as it will be; what holds for some of them only says for which."""
        found: dict[tuple[str, int | str | None, str], list[int]] = {}
        views: list[Island | None] = [*self.islands] or [None]
        for island in views:
            for problem in self.broken(island):
                found.setdefault(problem, []).append(island.table.id if island else 0)
        for (key, where, message), ids in found.items():
            some = f" (island {', '.join(map(str, ids))})" if len(ids) < len(self.islands) else ""
            self.problems.add(where, key, message + some)
        told = {(key, where) for key, where, _ in found}
        for old in (*self.deferred, *(old for island in self.islands for old in island.deferred)):
            if (old.key, old.where) not in told and old.note():
                self.notes.append(old.note())
        self.check_lockstep()

    def check_lockstep(self) -> None:
        """With method sync, islands must be alike in more than in what their tables could not say anyway."""
        if not self.islands or self.config(self.layers(None)).semi_sync.method != "sync":
            return
        first, *others = self.islands
        base = self.config(self.layers(first))
        for island in others:
            layers = self.layers(island)
            differing = [*lockstep_differences(self.config(layers), base)]
            if island.world() != first.world():
                differing.append((WORLD, island.world(), first.world()))
            for key, here, there in differing:
                self.problems.add(
                    island.where if key == WORLD else place(key, layers[1:]),
                    key,
                    f"({here} on island {island.table.id}, {there} on island {first.table.id}) must be the same on all "
                    'islands with semi_sync.method = "sync"',
                )

    def broken(self, island: Island | None) -> Iterator[tuple[str, int | str | None, str]]:
        layers = self.layers(island)
        config, bad = self.config(layers), self.bad(layers)
        for key, message in broken_ranges(config):
            if key not in bad:
                where = place(key, layers[1:])
                yield self.named(key, where, island), where, message
        if not self.read:
            return
        for involved, message in broken_relations(config, island.world() if island else None):
            if not bad.intersection(involved):
                places = (
                    island.where if key == WORLD and island else place(key, layers[1:]) for key in involved
                )
                where = next((p for p in places if p is not None), None)
                yield self.named(involved[0], where, island), where, message
        for old in (*self.deferred, *(island.deferred if island else ())):
            message = old.problem(config, bad)
            if message:
                yield old.key, old.where, message

    def named(self, key: str, where: Where | None, island: Island | None) -> str:
        """The key as it is written there: an island's own number of steps, a setting under its old name."""
        for written, own in OWN_KEY.items():
            if island and key == own and key in island.layer.values:
                return f"{KEY}[{self.islands.index(island)}].{written}"
        old = self.renamed.get(key) if where == self.written.where.get(key) else None
        return f"{key}, written as {old}" if old else key

    def bad(self, layers: Sequence[Layer]) -> set[str]:
        return {key for layer in layers for key in layer.bad}
