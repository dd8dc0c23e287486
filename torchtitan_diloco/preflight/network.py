"""What an island dials and what it listens on, tried out."""

import time

from torchtitan_diloco.config.reach import needs_hub, needs_lighthouse
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.preflight.gloo import gloo_probes
from torchtitan_diloco.preflight.hub import hub_probes
from torchtitan_diloco.preflight.rows import Probe, Row, look
from torchtitan_diloco.preflight.spool import spool_probes

LIMIT_S = 8.0
"""For all of it; with the start of the command it stays below ten seconds."""


def network_rows(config: RunConfig, run: RunConfig, wait_s: float = 0.0) -> list[Row]:
    """config: of this island, as it is of ``run``. wait_s: how much longer other islands' preflights are waited for."""
    until = time.monotonic() + LIMIT_S + wait_s
    if needs_lighthouse(config):
        probes = gloo_probes(config, run)
    elif needs_hub(config):
        probes = hub_probes(config) if config.transport.kind == "hub" else spool_probes(config)
    else:
        probes = [_nothing(config)]
    return look(probes, until)


def _nothing(config: RunConfig) -> Probe:
    method, kind = config.semi_sync.method, config.transport.kind
    row = Row("network", "out", "", "ok", f'nothing is dialled with method "{method}" and transport "{kind}"')
    return Probe(row.name, row.way, row.place, "", lambda until: [row])
