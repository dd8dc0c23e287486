"""Writes a resolved configuration as TOML, for the run folder."""

from dataclasses import fields, is_dataclass
from typing import Any

import tomli_w

from torchtitan_diloco.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML: every key, absent ones (None) left out. Loading it gives an equal configuration."""
    return tomli_w.dumps(_plain(config))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        named = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _plain(v) for name, v in named if v is not None}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value
