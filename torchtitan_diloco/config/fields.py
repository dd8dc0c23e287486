"""What the schema says, as data: every dotted key with its kind and default, and every section."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torchtitan_diloco.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key may hold. ``optional`` = may be absent (None); TOML itself has no null."""

    base: Literal["bool", "int", "float", "str", "choice", "list", "table"]
    optional: bool = False
    choices: tuple[str, ...] = ()
    item: "Kind | None" = None
    table: type | None = None


def kind_of(annotation: Any) -> Kind:
    """Kind of a field annotation of the schema; TypeError for one the loader could not check."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in args if a is not type(None))
        k = kind_of(inner)
        return Kind(base=k.base, optional=True, choices=k.choices, item=k.item, table=k.table)
    if origin is Literal:
        return Kind(base="choice", choices=args)
    if origin is list:
        return Kind(base="list", item=kind_of(args[0]))
    if is_dataclass(annotation) and isinstance(annotation, type):
        return Kind(base="table", table=annotation)
    names: dict[Any, Literal["bool", "int", "float", "str"]] = {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
    }
    if annotation in names:
        return Kind(base=names[annotation])
    raise TypeError(f"no check for fields of type {annotation!r}")


@cache
def kinds(table: type) -> dict[str, Kind]:
    """Key -> kind of one table's dataclass, in order; without what holds settings of any key (`IslandTable`)."""
    hints = get_type_hints(table)
    return {f.name: kind_of(hints[f.name]) for f in fields(table) if not f.metadata.get("free")}


@cache
def required(table: type) -> tuple[str, ...]:
    """Keys of a table that have no default."""
    return tuple(f.name for f in fields(table) if f.default is MISSING and f.default_factory is MISSING)


def _walk(table: type, prefix: str) -> Iterator[tuple[str, Kind]]:
    for name, kind in kinds(table).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, kind
        if kind.base == "table":
            assert kind.table is not None
            yield from _walk(kind.table, path)


@cache
def keys() -> dict[str, Kind]:
    """Every key that holds a value, dotted ("semi_sync.outer.lr"), in schema order."""
    return {path: kind for path, kind in _walk(RunConfig, "") if kind.base != "table"}


@cache
def sections() -> dict[str, type]:
    """Every table, dotted ("semi_sync.outer")."""
    return {path: kind.table for path, kind in _walk(RunConfig, "") if kind.table is not None}


def get(config: RunConfig, path: str) -> Any:
    """Value of a dotted key; KeyError when there is none."""
    if path not in keys():
        raise KeyError(path)
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def put(config: RunConfig, path: str, value: Any) -> None:
    """Set a dotted key; KeyError when there is none. The value is not checked."""
    if path not in keys():
        raise KeyError(path)
    *parents, leaf = path.split(".")
    node: Any = config
    for part in parents:
        node = getattr(node, part)
    setattr(node, leaf, value)


def items(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a configuration, in schema order; list items of tables as "data.sources[0].path"."""
    for path in keys():
        yield from leaves(path, get(config, path))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of one key; of an array of tables the keys of its entries, and those an island has set."""
    if not is_array_of_tables(path):
        yield path, value
        return
    for i, entry in enumerate(value):
        table: type = type(entry)
        for name in kinds(table):
            yield f"{path}[{i}].{name}", getattr(entry, name)
        for key, own in getattr(entry, "settings", {}).items():
            for leaf, held in leaves(key, own):
                yield f"{path}[{i}].{leaf}", held


def is_array_of_tables(path: str) -> bool:
    """Whether a dotted key is written [[so]]."""
    item = keys()[path].item
    return item is not None and item.table is not None
