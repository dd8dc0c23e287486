"""Which time-outs count in a run, in one table: what they bound, from the shortest wait to the longest."""

from collections.abc import Iterator

from torchtitan_diloco.config.fields import get
from torchtitan_diloco.config.schema import RunConfig

_GLOO = {
    "lighthouse.heartbeat_timeout_s": "silence of an island until the others go on without it",
    "transport.exchange_timeout_s": "an exchange in which nothing arrives",
}
_HUB = {
    "syncer.heartbeat_timeout_s": "silence of an island until the others go on without it",
    "syncer.hang_timeout_s": "a training loop that shows no life",
    "syncer.wait_s": "a slot's wait for islands that live",
}
_ALL = {
    "lighthouse.patience_s": "the wait for peers at founding and joining",
    "comm.train_timeout_seconds": "a collective inside an island",
    "comm.init_timeout_seconds": "the same, until the first step",
}


def timeouts(config: RunConfig) -> Iterator[str]:
    """A line for each."""
    if config.semi_sync.method == "none":
        return
    for setting, bounds in ((_GLOO if config.transport.kind == "gloo" else _HUB) | _ALL).items():
        value = get(config, setting)
        shown = "3600 s or two measured windows" if value is None else f"{value:g} s"
        yield f"{setting} = {shown}: {bounds}"
