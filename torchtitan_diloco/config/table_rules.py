"""Rules about the entries of arrays of tables, which name the entry."""

import json
import os
from collections.abc import Callable, Iterator

from torchtitan_diloco.config.ranges import shards
from torchtitan_diloco.config.schema import RunConfig

Broken = tuple[tuple[str, ...], str]
"""(keys, the one to blame first; message)"""


def broken_tables(config: RunConfig) -> Iterator[Broken]:
    """Each rule about an entry that does not hold."""
    yield from _present_beyond_the_shards(config)
    yield from _twice("data.sources", "path", [source.path for source in config.data.sources], _place)
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


def _place(path: str) -> str:
    """The same for all ways to write a path, through links too; of a Megatron corpus either file stands for both."""
    try:
        place = os.path.realpath(path) if path else ""
    except (OSError, ValueError):
        return path
    return f"{place.removesuffix('.idx')}.bin" if place.endswith(".idx") else place


def _twice(
    table: str, key: str, values: list[str], meaning: Callable[[str], str] = lambda value: value
) -> Iterator[Broken]:
    """meaning: equal for values that say the same thing."""
    first: dict[str, int] = {}
    for i, value in enumerate(values):
        if value and (before := first.get(meaning(value))) is not None:
            other = "" if values[before] == value else f" ({_quoted(values[before])}), written differently"
            yield (
                (f"{table}[{i}].{key}",),
                f"({_quoted(value)}) is already that of {table}[{before}]{other}; remove one of them "
                f"or give it another {key}",
            )
        first.setdefault(meaning(value), i)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
