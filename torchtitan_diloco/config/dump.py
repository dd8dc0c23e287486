"""Writes a resolved configuration as TOML, for the run folder."""

from dataclasses import fields, is_dataclass
from typing import Any

import tomli_w

from torchtitan_diloco.config.fields import keys, kinds
from torchtitan_diloco.config.schema import IslandTable, RunConfig

ABSENT = "none"
"""Stands for an absent value where leaving the key out would mean something else."""


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML: every key, absent ones (None) left out. Loading it gives an equal configuration.

    With job.base, absent ones are written as "none", since a key left out would come from the base. With [[islands]],
    island.id is left out: it says whose configuration this is, which is for the command line to say.
    """
    document = _plain(config, keep_absent=bool(config.job.base))
    if config.islands:
        del document["island"]["id"]
    else:
        del document["islands"]
    return tomli_w.dumps(document)


def _plain(value: Any, *, keep_absent: bool) -> Any:
    if isinstance(value, IslandTable):
        return _island(value)
    if is_dataclass(value) and not isinstance(value, type):
        table: type = type(value)
        named = ((f.name, getattr(value, f.name)) for f in fields(value))
        optional = {name for name, kind in kinds(table).items() if kind.optional}
        return {
            name: ABSENT if v is None else _plain(v, keep_absent=keep_absent)
            for name, v in named
            if v is not None or (keep_absent and name in optional)
        }
    if isinstance(value, list):
        return [_plain(v, keep_absent=keep_absent) for v in value]
    return value


def _island(table: IslandTable) -> dict[str, Any]:
    own = {name: getattr(table, name) for name in kinds(IslandTable)}
    document = {name: value for name, value in own.items() if value is not None}
    for key in (k for k in keys() if k in table.settings):
        *parents, leaf = key.split(".")
        node = document
        for part in parents:
            node = node.setdefault(part, {})
        value = table.settings[key]
        node[leaf] = ABSENT if value is None else _plain(value, keep_absent=True)
    return document
