"""The TOML sections that TorchTitan does not have: data, island(s), lighthouse, transport, semi_sync."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True, slots=True)
class DataSource:
    """One [[data.sources]] table."""

    path: str
    """Folder of a prepared corpus (`torchtitan-diloco data prepare`), or the `.bin` (or `.idx`) of a Megatron corpus."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    prepare_from: str = ""
    """Text, JSONL or Parquet file, Hugging Face datasets folder or "bundled:kjv", prepared into `path` on first use; "" =
    `path` must exist."""
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
    """Whether all islands must hold the same corpora, which is checked when they join; false = each reads what it names.

    Absent, it is false where the `path`s in the [[islands]] tables differ.
    """
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
    """Address or network interface by which peers reach this island; "" = the one that routes to the Lighthouse."""
    port: int = 0
    """Port for peers; 0 = a free one."""
    own_sync_every: int | None = None
    """Inner steps of this island in the time of `semi_sync.sync_every` of the run's (its own H); absent = as many."""


@dataclass(kw_only=True, slots=True)
class IslandTable:
    """One [[islands]] table: an island, and the settings it has for itself"""

    id: int
    """Number of the island, from 0; each has its own."""
    name: str = ""
    """Name for display; "" = none."""
    site: str = ""
    """Where it runs; "" = not said."""
    nodes: int = 1
    """Machines."""
    ranks: int | None = None
    """Processes per machine; absent = not said."""
    settings: dict[str, Any] = field(default_factory=dict, metadata={"free": True})
    """Dotted key -> value in place of the run's. In TOML these are sub-tables, [islands.training] and so on."""


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
    """How long a quorum waits for islands that beat but have not asked; with method "sync", `run` takes at least
    transport.exchange_timeout_s."""
    quorum_interval_s: float = 0.2
    """Time between two quorum requests of an island."""
    patience_s: float = 600.0
    """How long an island waits for its peers or the hub, at founding and at join, before it gives up; and for how long it
    trains on, over gloo, after the Lighthouse has gone silent, before it saves and ends resumable."""


@dataclass(kw_only=True, slots=True)
class TransportConfig:
    """[transport]: how deltas travel"""

    kind: str = "gloo"
    """Registered transport."""
    exchange_timeout_s: float = 90.0
    """Seconds without an arrival after which an exchange has failed; with method "sync" less than [comm]'s time-outs."""
    max_rate: float = 0.0
    """Ceiling for what this island sends in bulk, in Mbit/s; 0 = none."""
    streams: int | None = None
    """Connections that each fragment's bulk is dealt to, between two islands (gloo) or to the hub; absent = 1 or 8."""
    urls: list[str] = field(default_factory=list)
    """With "hub", its addresses, `http://HOST:PORT` each, of which the next is tried when one fails; `run` starts one and
    fills this in."""
    ca_file: str = ""
    """PEM file of the authorities that an https hub's certificate is checked against; "" = the system's."""
    token_file: str = ""
    """File with this island's token for the hub on one line, readable by its owner only; "" = none."""
    dir: str = ""
    """With "spool", the folder of the exchanged files, on a file system that all machines of the island see."""


@dataclass(kw_only=True, slots=True)
class SyncerConfig:
    """[syncer]: the hub that islands with `transport.kind = "hub"` dial; all times in seconds"""

    bind: str = "127.0.0.1:29520"
    """HOST:PORT to listen on; port 0 takes a free one. Beyond loopback, `tokens` is needed."""
    cert: str = ""
    """PEM file of its certificate, followed by those that lead to the authority; with it the hub speaks https."""
    key: str = ""
    """PEM file of the certificate's private key, without a passphrase; "" = it is in `cert`."""
    tokens: str = ""
    """TOML file, readable by its owner only, of who may do what: `island-0 = "TOKEN"` and so on, `operator`, `reader`.

    "" = whoever reaches the hub may do everything. The hub that `run` starts on loopback uses neither tokens nor cert.
    """
    dir: str = ""
    """Folder of its durable state; "" = `syncer` in the run's folder."""
    save_every: int = 1
    """Committed versions from one save of anchor and momentum to the next, and at its end; after a crash islands bring the
    rest."""
    heartbeat_timeout_s: float = 5.0
    """Silence after which an island is gone, and its slots go on without it."""
    hang_timeout_s: float = 600.0
    """Time without life in an island's training loop after which it counts as gone, however well it beats."""
    wait_s: float | None = None
    """From the first island that is ready for a slot until the slot goes on without those that are not; absent = an hour, or
    two windows of the slowest of these (H x its measured step time), whichever is longer."""
    spools: list[str] = field(default_factory=list)
    """Folders, mirrored from and to the `transport.dir` of islands with `transport.kind = "spool"`."""
    spool_timeout_s: float = 86400.0
    """Silence after which such an island is gone: how long its site may be out of reach of the mirror."""
    workers: int = 0
    """Processes that the hub starts beside itself, which the fragments are spread over by bytes; 0 = it does all itself."""
    worker_port: int = 0
    """Port of the first of them; the others take the next ones. 0 = free ones, where no firewall is between."""
    worker_urls: list[str] = field(default_factory=list)
    """Instead of `workers`: addresses, as islands dial them, of those started elsewhere with `syncer FILE.toml --worker`."""
    worker_secret: str = ""
    """With `worker_urls`, file with the secret of the hub and these workers on one line, readable by its owner only."""


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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the outer learning rate falls over the run, from `lr` at its first slot to min_lr_factor times `lr` at its last."""
    min_lr_factor: float = 0.1
    """Share of `lr` that the schedule ends with."""


@dataclass(kw_only=True, slots=True)
class MergeConfig:
    """[semi_sync.merge]: how deltas become one"""

    method: str = "mean"
    """Merge rule."""
    weight: Literal["tokens", "steps", "equal"] = "tokens"
    """Weight of an island's delta: "tokens" is tokens^2 / steps (quantity times effective batch), "equal" one for all."""


@dataclass(kw_only=True, slots=True)
class CodecConfig:
    """[semi_sync.codec]: how a delta becomes bytes"""

    wire: str = "fp32"
    """Registered codec: "fp32", "bf16", "int8", "int4", "fp4_e3m0" or "topk"."""
    error_feedback: bool = False
    """Add what the codec lost in one slot to the delta of the next; beyond four islands, to the merged delta as well."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Stochastic rounding is unbiased; its noise is a function of run, slot, fragment and island."""
    block: int | None = None
    """Values that share a scale (int8, int4, fp4_e3m0); absent = the codec's own."""
    density: float | None = None
    """Share of the values that topk sends; absent = its own."""


@dataclass(kw_only=True, slots=True)
class SemiSyncConfig:
    """[semi_sync]"""

    method: str = "diloco"
    """Registered method, for instance "none" (plain TorchTitan), "sync" (gradients are averaged in every step), "local_sgd",
    "diloco"."""
    sync_every: int = 100
    """Inner steps between two sends of one fragment (H); with method "sync" the steps that one `round` event sums up."""
    fragments: int = 1
    """Parts of the model that are exchanged one after the other (P)."""
    fragment_by: Literal["tensor", "layer", "sequential"] = "tensor"
    """Fragments of nearly equal size; or of whole layers, strided over the depth or in consecutive runs."""
    module_fqns_per_fragment: list[list[str]] | None = None
    """Explicit fragments: a list of module names for each (TorchTitan's `module_fqns_per_model_fragment`)."""
    overlap: int = 0
    """Inner steps from sending a fragment to applying its result, while training goes on (tau)."""
    mix_alpha: float = 0.0
    """Share of the local parameters that stays when a result is applied; 0 = the new anchor replaces them."""
    max_failed_slots: int = 32
    """Slots in a row that may fail, with steps to merge, before the island ends with the reason; 0 = any number."""
    num_islands: int = 1
    """How many islands found the run; with more than four, each merges a slice of every fragment for all."""
    found: Literal["wait_all", "majority", "any"] = "wait_all"
    """Who founds the run where `num_islands` are not there within lighthouse.patience_s: nobody (islands then end, and can be
    resumed), more than half of them, or whoever is there."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """Outer optimizer."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """Merge rule."""
    codec: CodecConfig = field(default_factory=CodecConfig)
    """Wire format."""
