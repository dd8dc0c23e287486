"""Rules about the entries of arrays of tables, which name the entry."""

import json
from collections.abc import Iterator

from torchtitan_diloco.config.ranges import shards
from torchtitan_diloco.config.schema import RunConfig

Broken = tuple[tuple[str, ...], str]
"""(keys, the one to blame first; message)"""


def broken_tables(config: RunConfig) -> Iterator[Broken]:
    """Each rule about an entry that does not hold."""
    yield from _present_beyond_the_shards(config)
    yield from _twice("data.sources", "path", [source.path for source in config.data.sources])
    yield from _twice("islands", "name", [table.name for table in config.islands])


def _present_beyond_the_shards(config: RunConfig) -> Iterator[Broken]:
    count = config.data.shards
    for i, source in enumerate(config.data.sources):
        last = max(shards(source.present), default=0)
        if last >= count:
            yield (
                (f"data.sources[{i}].present", "data.shards"),
                f"({json.dumps(source.present)}) names shard {last}, and data.shards = {count} are numbered from 0 to "
                f"{count - 1}; name only those or raise data.shards",
            )


def _twice(table: str, key: str, values: list[str]) -> Iterator[Broken]:
    first: dict[str, int] = {}
    for i, value in enumerate(values):
        if value and value in first:
            yield (
                (f"{table}[{i}].{key}",),
                f"({json.dumps(value, ensure_ascii=False)}) is already that of {table}[{first[value]}]; remove one of them "
                f"or give it another {key}",
            )
        first.setdefault(value, i)
