"""Where settings come from: a base, the file, an island's table, the command line; the later ones win."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.config.fields import put
from torchtitan_diloco.config.problems import DEFAULT
from torchtitan_diloco.config.schema import RunConfig

Where = int | str
"""A line number, or words such as "command line"."""


@dataclass(slots=True)
class Layer:
    """What one place says."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> checked value."""
    where: dict[str, Where] = field(default_factory=dict)
    """Dotted key, also of entries ("data.sources[0].path") -> where it stands."""
    bad: set[str] = field(default_factory=set)
    """Keys already reported, about which rules have nothing to say."""

    def put(self, key: str, value: Any, where: Where | None) -> None:
        self.values[key] = value
        if where is not None:
            self.where[key] = where


def combine(layers: Iterable[Layer]) -> RunConfig:
    """The configuration that the layers give, each winning over those before it."""
    config = RunConfig()
    for layer in layers:
        for key, value in layer.values.items():
            put(config, key, deepcopy(value))
    return config


def place(key: str, layers: Sequence[Layer]) -> Where | None:
    """Where a key stands in the last layer that says something about it or about the array entry it belongs to."""
    for layer in reversed(layers):
        for name in _with_arrays(key):
            if name in layer.where:
                return layer.where[name]
    return None


def _with_arrays(key: str) -> Iterator[str]:
    """``a[0].b[1].c``, ``a[0].b[1]``, ``a[0].b``, ``a[0]``, ``a``"""
    yield key
    while "[" in key:
        key = key[: key.rindex("[")] if key.endswith("]") else key[: key.rindex("]") + 1]
        yield key


def origin(key: str, layers: Sequence[Layer], file: str) -> str:
    """The same in words: "default", "FILE:LINE", "base NAME" or "command line"."""
    where = place(key, layers)
    if where is None:
        return DEFAULT
    return f"{file}:{where}" if isinstance(where, int) else where
