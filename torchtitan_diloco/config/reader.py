"""Reads parsed TOML into a `Layer`, reporting every key that is unknown, wrong, retired or not allowed there."""

from collections.abc import Callable
from typing import Any

from torchtitan_diloco.config.deferred import Deferred, depends_on_others
from torchtitan_diloco.config.fields import Kind, is_array_of_tables, keys, kinds, required, sections
from torchtitan_diloco.config.layers import Layer, Where
from torchtitan_diloco.config.names import unknown_item_key, unknown_key, unknown_section
from torchtitan_diloco.config.problems import Problems
from torchtitan_diloco.config.retired import (
    HARMLESS,
    MOVED,
    NAME_MODULES,
    RENAMED_MODULES,
    RETIRED,
    Moved,
)
from torchtitan_diloco.config.toml_lines import Path as KeyPath
from torchtitan_diloco.config.values import WrongValue, check_value, describe

Refusal = Callable[[str], str | None]
"""Key -> why it must not stand here; None if it may."""


def dotted(path: KeyPath) -> str:
    """``data.sources[0].path``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class Reader:
    """Fills one layer from the parts of a document.

    Args:
        lines: Line of every path of the document; a path without one is at ``otherwise``.
        root: Path of the table that holds the sections: () for a file, ("islands", 0) for an island's table.
    """

    def __init__(
        self,
        problems: Problems,
        layer: Layer,
        lines: dict[KeyPath, int],
        *,
        otherwise: Where | None = None,
        root: KeyPath = (),
        refusal: Refusal = lambda key: None,
    ) -> None:
        self.problems = problems
        self.layer = layer
        self.lines = lines
        self.otherwise = otherwise
        self.root = root
        self.refusal = refusal
        self.notes: list[str] = []
        self.renamed: dict[str, str] = {}
        """Key -> the old name under which it was written."""
        self.deferred: list[Deferred] = []
        """What is right or wrong depending on settings that are not known yet."""

    def at(self, path: KeyPath) -> Where | None:
        """Where a path stands, or the nearest table around it."""
        found = (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines)
        return next(found, self.otherwise)

    def place(self, path: KeyPath) -> str:
        where = self.at(path)
        return f"{self.problems.file}:{where}" if isinstance(where, int) else str(where)

    def problem(self, path: KeyPath, message: str) -> None:
        self.problems.add(self.at(path), dotted(path), message)
        self.layer.bad.add(dotted(path[len(self.root) :]))

    def read(self, written: dict[str, Any], path: KeyPath | None = None) -> None:
        """Read a table with all that is below it. ``path``: where it stands; the root if not given."""
        path = self.root if path is None else path
        for name, value in written.items():
            here = (*path, name)
            key = dotted(here[len(self.root) :])
            if key in MOVED:
                self.moved(here, value, MOVED[key])
            elif key in RETIRED and not isinstance(value, dict):
                self.retired(key, here, value)
            elif key in sections() or _has_old_keys(key):
                if isinstance(value, dict):
                    self.read(value, here)
                else:
                    self.problem(here, f"must be a table, written [{key}], got {describe(value)}")
            elif key in keys():
                self.value(key, here, value)
            elif key in RETIRED or (path and dotted(path[len(self.root) :]) in RETIRED):
                remedy = RETIRED.get(key) or RETIRED[dotted(path[len(self.root) :])]
                self.problem(here, f"gone in TorchTitan 0.3: {remedy}")
            else:
                self.unknown(key, here, value)

    def value(self, key: str, here: KeyPath, value: Any) -> None:
        """Take the value of a key of the schema; report it where it is wrong."""
        why = self.refusal(key)
        if why:
            self.problem(here, f"cannot differ between islands: {why}")
        elif key in self.renamed:
            self.problem(here, f"is given a second time, as {self.renamed[key]}; keep one of them")
        elif is_array_of_tables(key):
            table = getattr(keys()[key].item, "table", None)
            self.layer.put(key, self.tables(table, value, here), self.at(here))
        else:
            try:
                checked = check_value(keys()[key], value)
                if key in NAME_MODULES and checked is not None:
                    checked = self.renamed_modules(here, checked)
                # v0.2's default of lists that may be absent: one meaning, or rules, islands and trainers would differ.
                absent = keys()[key].optional and checked == []
                self.layer.put(key, None if absent else checked, self.at(here))
            except WrongValue as e:
                if depends_on_others(key, value):
                    self.defer(key, here, value, str(e))
                else:
                    self.problem(here, str(e))

    def tables(self, table: Any, value: Any, path: KeyPath) -> list[Any]:
        """Entries of an array of tables, as instances of the dataclass ``table``."""
        key = dotted(path)
        if not isinstance(value, list):
            self.problem(path, f"must be an array of tables, written [[{key}]], got {describe(value)}")
            return []
        entries = []
        for i, entry in enumerate(value):
            here = (*path, i)
            values = None
            if isinstance(entry, dict):
                values = self.fields(table, entry, here)
            else:
                self.problem(here, f"must be a table, written [[{key}]], got {describe(entry)}")
            if values is None:
                # Something must stand in its place, or those after it would be called by its number.
                values = dict.fromkeys(required(table), "")
                inside = here[len(self.root) :]
                self.layer.bad |= {dotted(inside[:-1]), *(dotted((*inside, name)) for name in values)}
            entries.append(table(**values))
        return entries

    def fields(self, table: type, written: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
        """Values of the dataclass ``table`` among ``written``; None where one without a default is missing or wrong."""
        values: dict[str, Any] = {}
        for name, value in written.items():
            here = (*path, name)
            if name not in kinds(table):
                self.problem(here, unknown_item_key(name, dotted(path), table))
                continue
            where = self.at(here)
            if where is not None:
                self.layer.where[dotted(here[len(self.root) :])] = where
            try:
                values[name] = check_value(kinds(table)[name], value)
            except WrongValue as e:
                self.problem(here, str(e))
        missing = [name for name in required(table) if name not in written]
        for name in missing:
            self.problems.add(self.at(path), dotted((*path, name)), "is missing")
        if missing:
            self.layer.bad.add(dotted(path[len(self.root) :]))
        return values if all(name in values for name in required(table)) else None

    # ---- what TorchTitan 0.3 has no more, or elsewhere

    def retired(self, key: str, here: KeyPath, value: Any) -> None:
        if any(type(v) is type(value) and v == value for v in HARMLESS.get(key, ())):
            self.note(here, "has no effect: TorchTitan 0.3 has no such setting")
        elif depends_on_others(key, value):
            self.defer(key, here, value, f"gone in TorchTitan 0.3: {RETIRED[key]}")
        else:
            self.problem(here, f"gone in TorchTitan 0.3: {RETIRED[key]}")

    def defer(self, key: str, here: KeyPath, value: Any, mistake: str) -> None:
        at = f"{dotted(here)} at {self.place(here)}"
        self.deferred.append(Deferred(key, value, self.at(here), mistake, at))

    def renamed_modules(self, here: KeyPath, names: list[Any]) -> list[Any]:
        """Names of modules, also in lists of lists, as TorchTitan 0.3 has them."""
        found: list[Any] = []
        for name in names:
            if isinstance(name, list):
                found.append(self.renamed_modules(here, name))
                continue
            found.append(RENAMED_MODULES.get(name, name))
            if found[-1] != name:
                self.note(here, f'holds "{name}", which is "{found[-1]}" now')
        return found

    def moved(self, here: KeyPath, value: Any, to: Moved) -> None:
        """Take the value of a key with an old name."""
        old = dotted(here)
        try:
            value = check_value(Kind(base=to.base), value) if to.base else value
            if to.only and value not in to.only:
                allowed = " or ".join(f'"{v}"' for v in to.only)
                raise WrongValue(f'must be {allowed} ({to.new}), got "{value}"')
        except WrongValue as e:
            self.problem(here, str(e))
            return
        if to.new in self.layer.values:
            self.problem(here, f"is {to.new} now, which is written as well; remove this one")
            return
        self.value(to.new, here, value / to.divisor if to.divisor != 1 else value)
        self.renamed[to.new] = old
        self.note(here, f"is {to.new} now")

    def note(self, here: KeyPath, text: str) -> None:
        self.notes.append(f"{dotted(here)} at {self.place(here)} {text}")

    def unknown(self, key: str, here: KeyPath, value: Any) -> None:
        is_table = isinstance(value, dict) or (
            isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        )
        if not is_table:
            self.problem(here, unknown_key(key))
            return
        message, meant = unknown_section(key)
        self.problem(here, message)
        for name in value if meant in sections() and isinstance(value, dict) else ():
            if f"{meant}.{name}" not in keys() and f"{meant}.{name}" not in sections():
                self.problem((*here, name), unknown_key(f"{meant}.{name}"))


def _has_old_keys(key: str) -> bool:
    """Whether a table that the schema does not have holds keys of v0.2 that get an answer of their own."""
    return any(old.startswith(f"{key}.") for old in (*RETIRED, *MOVED))
