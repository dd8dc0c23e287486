"""The TOML sections that TorchTitan does not have: data, island, lighthouse, transport, semi_sync."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, slots=True)
class DataSource:
    """One [[data.sources]] table."""

    path: str
    """Folder of a prepared corpus (`torchtitan-diloco data prepare`), or the `.bin` (or `.idx`) of a Megatron corpus."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    prepare_from: str = ""
    """Text, JSONL or Parquet file, or "bundled:kjv", prepared into `path` on first use; "" = `path` must exist."""
    present: str = ""
    """Shards of it that this island may read, for instance "0-31,40"; "" = all. What no island may read is deferred."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """[data]"""

    seed: int = 0
    """Seed of the sample order, which is a pure function of (seed, source, epoch, position)."""
    shards: int = 64
    """Into how many shards a source is cut for the whole run; islands share out shards, so at least as many as islands."""
    shared: bool = True
    """Whether all islands read the same sources, which is checked when they join; false = each its own [[data.sources]]."""
    sources: list[DataSource] = field(default_factory=list)
    """Corpora; none = TorchTitan's own loader with training.dataset."""


@dataclass(kw_only=True, slots=True)
class IslandConfig:
    """[island]: who this process group is"""

    id: int = 0
    """Stable number of the island, from 0."""
    name: str = ""
    """Name for display; "" = none."""
    advertise: str = ""
    """Address that peers dial; "" = the local address that routes to the Lighthouse."""
    port: int = 0
    """Port for peers; 0 = a free one."""


@dataclass(kw_only=True, slots=True)
class LighthouseConfig:
    """[lighthouse]: membership; all times in seconds"""

    address: str = ""
    """`http://host:port` of the Lighthouse; `run` starts one and fills this in."""
    heartbeat_interval_s: float = 0.5
    """Time between two heartbeats of an island."""
    heartbeat_timeout_s: float = 5.0
    """Silence after which the Lighthouse counts an island as gone."""
    join_timeout_s: float = 1.0
    """How long a quorum waits for islands that beat but have not asked."""
    quorum_interval_s: float = 0.2
    """Time between two quorum requests of an island."""
    patience_s: float = 600.0
    """How long an island waits for the Lighthouse or its peers, at founding and at join, before it gives up."""


@dataclass(kw_only=True, slots=True)
class TransportConfig:
    """[transport]: how deltas travel"""

    kind: str = "gloo"
    """Registered transport."""
    exchange_timeout_s: float = 120.0
    """An exchange that takes longer has failed, in seconds."""


@dataclass(kw_only=True, slots=True)
class OuterConfig:
    """[semi_sync.outer]: the outer optimizer"""

    name: str = "sgd"
    """Outer optimizer."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum."""
    nesterov: bool = True
    """Nesterov's form of it."""


@dataclass(kw_only=True, slots=True)
class MergeConfig:
    """[semi_sync.merge]: how deltas become one"""

    method: str = "mean"
    """Merge rule."""
    weight: Literal["tokens", "steps", "equal"] = "tokens"
    """What an island's delta weighs: its tokens or inner steps since the anchor it is based on, or the same for all."""


@dataclass(kw_only=True, slots=True)
class SemiSyncConfig:
    """[semi_sync]"""

    method: str = "diloco"
    """Registered method, for instance "none" (plain TorchTitan), "local_sgd", "diloco"."""
    sync_every: int = 100
    """Inner steps between two sends of one fragment (H)."""
    num_islands: int = 1
    """How many islands found the run."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """Outer optimizer."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """Merge rule."""
