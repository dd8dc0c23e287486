"""`torchtitan-diloco syncer`: the hub of a run, on any machine that the islands can dial."""

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_diloco.cli.hub_folder import claim, folder_of
from torchtitan_diloco.cli.local.command import RUN_ID
from torchtitan_diloco.cli.overrides import split_overrides
from torchtitan_diloco.cli.port_file import write_port
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.listening import is_loopback
from torchtitan_diloco.observe.logs import log_to_stderr


@dataclass(kw_only=True, slots=True)
class SyncerOptions:
    """Serve the islands of a run until SIGTERM or SIGINT. It needs no GPU and no model, only the run's TOML.

    Any setting of FILE can be overridden with --section.key value. It logs on stderr. Started again on the same folder it
    goes on where it was; islands reconnect by themselves.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The run's TOML file."""

    port_file: Path | None = None
    """Write the port here once the hub listens."""

    worker: bool = False
    """Be a worker of a hub on another host, whose syncer.worker_urls has this one's address."""


def main(argv: Sequence[str]) -> int:
    """The sub-command; returns the exit code. Raises UserError for wrong usage, Resumable when another hub took over."""
    own, overrides = split_overrides(argv)
    options = tyro.cli(SyncerOptions, args=own, prog="torchtitan-diloco syncer")
    config = load_config(options.file, overrides).config
    log_to_stderr()
    (serve_as_worker if options.worker else serve)(config, options.port_file)
    return 0


def serve_as_worker(config: RunConfig, port_file: Path | None) -> None:
    from torchtitan_diloco.hub.tokens import read_secret
    from torchtitan_diloco.hub.worker_process import Place, WorkerServer

    syncer = config.syncer
    if not syncer.worker_secret:
        raise UserError(
            "syncer.worker_secret is empty: it names the file with the secret that the hub has as well"
        )
    host, _, port = syncer.bind.rpartition(":")
    folder = str(folder_of(config) / "parts")
    run_id = os.environ.get(RUN_ID, config.job.name)
    place = Place(host.strip("[]"), int(port), run_id, folder, syncer.tokens, syncer.cert, syncer.key)
    server = WorkerServer(place, read_secret(syncer.worker_secret))
    warn_of_readers(host, syncer.cert, server.url)
    logging.info("a worker of the hub of run %s listens on %s", config.job.name, server.url)
    if port_file is not None:
        write_port(port_file, server.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.run()


def warn_of_readers(host: str, cert: str, url: str) -> None:
    if not cert and not is_loopback(host):
        logging.warning("without syncer.cert, tokens and weights can be read on the way to %s", url)


def serve(config: RunConfig, port_file: Path | None) -> None:
    from torchtitan_diloco.hub.access import Access
    from torchtitan_diloco.hub.rules import HOUR_S, WINDOWS, Rules
    from torchtitan_diloco.hub.server import HubServer
    from torchtitan_diloco.hub.store import Fenced
    from torchtitan_diloco.hub.tokens import read_tokens
    from torchtitan_diloco.hub.worker_process import Crewed

    host, _, port = config.syncer.bind.rpartition(":")
    wait_s = config.syncer.wait_s
    rules = Rules(
        config.syncer.heartbeat_timeout_s,
        config.syncer.hang_timeout_s,
        HOUR_S if wait_s is None else wait_s,
        WINDOWS if wait_s is None else 0.0,
    )
    tokens, cert = config.syncer.tokens, config.syncer.cert
    run_id = os.environ.get(RUN_ID, config.job.name)
    claim(folder_of(config), run_id, config.job.name)
    server = HubServer(
        host.strip("[]"),
        int(port),
        run_id,
        rules,
        folder_of(config),
        config.syncer.save_every,
        access=Access(read_tokens(tokens) if tokens else None),
        cert=cert,
        key=config.syncer.key,
        spools=[Path(folder) for folder in config.syncer.spools],
        spool_timeout_s=config.syncer.spool_timeout_s,
        crewed=Crewed(
            config.syncer.workers,
            config.syncer.worker_port,
            config.syncer.worker_urls,
            config.syncer.worker_secret,
            config.transport.ca_file,
        ),
        tokens=tokens,
    )
    warn_of_readers(host, cert, server.url)
    logging.info("the hub of run %s listens on %s", config.job.name, server.url)
    if port_file is not None:
        write_port(port_file, server.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    try:
        server.run()
    except Fenced as fenced:
        raise Resumable(str(fenced)) from None
