"""Reads a TOML file and command-line overrides into a `RunConfig`, or says everything that is wrong with them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from torchtitan_diloco.config.agreement import agreement
from torchtitan_diloco.config.dump import to_toml
from torchtitan_diloco.config.fields import items, keys, kinds, put, required
from torchtitan_diloco.config.names import unknown_item_key, unknown_key, unknown_section
from torchtitan_diloco.config.notes import notes
from torchtitan_diloco.config.overrides import parse_overrides, take_config_file
from torchtitan_diloco.config.problems import COMMAND_LINE, DEFAULT, ConfigError, Problems
from torchtitan_diloco.config.retired import HARMLESS, RETIRED
from torchtitan_diloco.config.rules import broken_ranges, broken_relations
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.toml_lines import Path as KeyPath
from torchtitan_diloco.config.toml_lines import key_lines
from torchtitan_diloco.config.values import WrongValue, check_value, describe, parse_text

__all__ = ["ConfigError", "Resolved", "agreement", "load_config", "take_config_file", "to_toml"]


@dataclass(slots=True)
class Resolved:
    """A configuration with where each value comes from."""

    config: RunConfig
    origins: dict[str, str]
    """Dotted key -> "default", "FILE:LINE" or "command line"; for every key."""
    path: Path
    """The file as given."""
    notes: list[str]
    """What is worth knowing and not wrong."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Load and check one file, with command-line settings on top.

    Args:
        path: TOML file. Paths inside it are kept as written, to be resolved against the working directory.
        overrides: Arguments such as ``["--training.steps", "10", "--debug.deterministic"]``; they win over the file.

    Raises:
        ConfigError: with all problems at once, one line each.
    """
    loader = _Loader(str(path))
    loader.read_file()
    loader.read_command_line(overrides)
    loader.check_rules()
    loader.problems.raise_if_any()
    config = loader.config
    if not config.job.name:
        config.job.name = Path(path).stem
    origins = {key: loader.origin(key) for key, _ in items(config)}
    origins |= {key: loader.origin(key) for key in keys()}
    return Resolved(config, origins, Path(path), loader.notes + notes(config, origins))


class _Loader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems = Problems(file)
        self.config = RunConfig()
        self.read = False
        self.lines: dict[KeyPath, int] = {}
        self.otherwise: str | None = None
        """Where a key without a line comes from."""
        self.where: dict[str, int | str] = {}
        """Key that was written somewhere -> line number or `COMMAND_LINE`."""
        self.bad: set[str] = set()
        """Keys already reported, about which rules have nothing to say."""
        self.notes: list[str] = []

    def origin(self, key: str) -> str:
        where = self.where.get(key)
        if where is None and "[" in key:
            where = self.where.get(key.partition("[")[0])
        if where is None:
            return DEFAULT
        return where if isinstance(where, str) else f"{self.file}:{where}"

    def at(self, path: KeyPath) -> int | str | None:
        return self.lines.get(path, self.otherwise)

    def problem(self, key: str, where: int | str | None, message: str) -> None:
        self.problems.add(where, key, message)
        self.bad.add(key)

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
            self.lines = key_lines(text)
        except (ValueError, RecursionError) as e:
            self.syntax_error(text, e)
            return
        self.config = self.read_table(RunConfig, document, ())
        self.read = True

    def syntax_error(self, text: str, error: Exception) -> None:
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        line = int(at[1]) if at and at[1] else text.count("\n") + 1 if at else None
        column = f" (column {at[2]})" if at and at[2] else ""
        what = str(error)[: at.start()] if at else str(error)
        self.problems.add(line, "", f"is not valid TOML: {what}{column}")

    def read_table(self, table: type, written: dict[str, Any], path: KeyPath) -> Any:
        """Instance of ``table`` with what could be used of ``written``; the rest is reported."""
        values: dict[str, Any] = {}
        for name, value in written.items():
            here = (*path, name)
            key, line = _dotted(here), self.at(here)
            kind = kinds(table).get(name)
            if key in RETIRED:
                self.read_retired(key, value, line)
            elif kind is None:
                self.problem(key, line, self.unknown(table, here, value))
            elif kind.base == "table":
                assert kind.table is not None
                if isinstance(value, dict):
                    values[name] = self.read_table(kind.table, value, here)
                else:
                    self.problem(key, line, f"must be a table, written [{key}], got {describe(value)}")
            else:
                if line is not None:
                    self.where[key] = line
                if kind.item is not None and kind.item.table is not None:
                    values[name] = self.read_tables(kind.item.table, value, here)
                    continue
                try:
                    values[name] = check_value(kind, value)
                except WrongValue as e:
                    self.problem(key, line, str(e))
        return table(**self.with_required(table, values, path))

    def read_tables(self, table: type, value: Any, path: KeyPath) -> list[Any]:
        key, line = _dotted(path), self.at(path)
        if not isinstance(value, list):
            self.problem(key, line, f"must be an array of tables, written [[{key}]], got {describe(value)}")
            return []
        entries = []
        for i, entry in enumerate(value):
            here = (*path, i)
            if isinstance(entry, dict):
                entries.append(self.read_table(table, entry, here))
            else:
                self.problem(
                    _dotted(here), self.at(here), f"must be a table, written [[{key}]], got {describe(entry)}"
                )
        return entries

    def with_required(self, table: type, values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        for name in required(table):
            key = _dotted((*path, name))
            if name not in values:
                values[name] = (
                    ""  # of strings only; the configuration is refused, this keeps the others checkable
                )
                if key not in self.bad:
                    self.problem(key, self.at(path), "is missing")
        return values

    def read_retired(self, key: str, value: Any, line: int | str | None) -> None:
        same = [v for v in HARMLESS.get(key, ()) if type(v) is type(value) and v == value]
        if same:
            self.notes.append(
                f"{key} at {self.file}:{line} has no effect: TorchTitan 0.3 has no such setting"
            )
        else:
            self.problem(key, line, f"gone in TorchTitan 0.3: {RETIRED[key]}")

    def unknown(self, table: type, here: KeyPath, value: Any) -> str:
        key = _dotted(here)
        if any(isinstance(part, int) for part in here):
            return unknown_item_key(str(here[-1]), _dotted(here[:-1]), table)
        is_table = isinstance(value, dict) or (
            isinstance(value, list) and value and isinstance(value[0], dict)
        )
        return unknown_section(key) if is_table else unknown_key(key)

    # ---- the command line

    def read_command_line(self, argv: Sequence[str]) -> None:
        self.lines, self.otherwise = {}, COMMAND_LINE
        for override in parse_overrides(argv):
            key = override.key
            if override.mistake:
                self.problem(key, COMMAND_LINE, override.mistake)
                continue
            kind = keys()[key]
            self.where[key] = COMMAND_LINE
            try:
                value = parse_text(kind, override.text)
            except WrongValue as e:
                self.problem(key, COMMAND_LINE, str(e))
                continue
            if kind.item is not None and kind.item.table is not None:
                for path in [p for p in self.where if p.startswith(f"{key}[")]:
                    del self.where[path]
                value = self.read_tables(kind.item.table, value, tuple(key.split(".")))
            put(self.config, key, value)

    # ---- rules

    def check_rules(self) -> None:
        for key, message in broken_ranges(self.config):
            if key not in self.bad:
                self.problem(key, self.place(key), message)
        for involved, message in broken_relations(self.config) if self.read else ():
            if not self.bad.intersection(involved):
                place = next((p for p in map(self.place, involved) if p is not None), None)
                self.problem(involved[0], place, message)

    def place(self, key: str) -> int | str | None:
        where = self.where.get(key)
        return self.where.get(key.partition("[")[0]) if where is None else where


def _dotted(path: KeyPath) -> str:
    """``data.sources[0].path``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
