"""Which settings all islands of a run must share, and why; every other one may differ from island to island."""

_PARAMETERS = "islands exchange the parameters of one model"
_OF_THE_RUN = "it is the run's, not an island's"
_OF_THE_TABLE = "the [[islands]] table itself says it"
_ONE_LIGHTHOUSE = "the islands of a run share one Lighthouse"

AGREED: dict[str, str] = {
    "model.name": _PARAMETERS,
    "model.flavor": _PARAMETERS,
    "model.vocab_size": _PARAMETERS,
    "training.seq_len": "corpora are packed to it, and slots count tokens by it",
    "training.steps": "all islands end at the same last slot",
    "training.dtype": _PARAMETERS,
    "data.seed": "the sample order is the run's",
    "data.shards": "islands share out the shards of the run",
    "debug.seed": "islands begin with the same weights",
    "transport.kind": 'islands talk to one another through it ("hub" and "spool" meet at one hub)',
    "transport.streams": "both ends of a link deal out the bulk alike",
    "semi_sync": "islands must agree on what is sent when and on how it is merged",
}
"""Key or section -> why islands must agree on it; compared when an island joins."""

_UPDATE = "every island makes the same optimizer step"
_SHARDS = "rank r of every island holds the same shards"

LOCKSTEP: dict[str, str] = {
    "parallelism": _SHARDS,
    "training.enable_cpu_offload": _SHARDS,
    "training.mixed_precision_param": "gradients travel in one precision",
    "training.mixed_precision_reduce": "gradients travel in one precision",
    "training.local_batch_size": "each island counts for as much as any other",
    "training.global_batch_size": "each island counts for as much as any other",
    "training.max_norm": _UPDATE,
    "optimizer": _UPDATE,
    "lr_scheduler": _UPDATE,
}
"""Key or section -> why islands that train in lock step (``semi_sync.method = "sync"``) must agree on it as well."""

_NOT_BY_ISLAND: dict[str, str] = {
    "job.base": _PARAMETERS,
    "job.name": _OF_THE_RUN,
    "job.description": _OF_THE_RUN,
    "data.shared": _OF_THE_RUN,
    "lighthouse.heartbeat_timeout_s": _ONE_LIGHTHOUSE,
    "lighthouse.join_timeout_s": _ONE_LIGHTHOUSE,
    "island.id": _OF_THE_TABLE,
    "island.name": _OF_THE_TABLE,
    "island.own_sync_every": "the [[islands]] table says it as semi_sync.sync_every",
    "islands": _OF_THE_RUN,
}


OWN_KEY: dict[str, str] = {"semi_sync.sync_every": "island.own_sync_every"}
"""Key that an [[islands]] table may set although islands must agree on it -> where the island's own value goes."""


def must_agree(key: str) -> bool:
    """Whether an island that has another value for this dotted key cannot join the run."""
    return _reason(AGREED, key) is not None


def must_agree_in_lockstep(key: str) -> bool:
    """The same for a run with ``semi_sync.method = "sync"``, where more must be equal."""
    return must_agree(key) or _reason(LOCKSTEP, key) is not None


def why_shared(key: str) -> str | None:
    """Why an [[islands]] table cannot set this dotted key; None if it can."""
    if key in OWN_KEY:
        return None
    return _reason(AGREED, key) or _reason(_NOT_BY_ISLAND, key)


def _reason(table: dict[str, str], key: str) -> str | None:
    return table.get(key) or table.get(key.partition(".")[0])
