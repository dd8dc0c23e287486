"""`torchtitan-diloco lighthouse`: TorchFT's quorum server, bound to loopback unless told otherwise."""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from torchtitan_diloco.cli.port_file import write_port
from torchtitan_diloco.errors import UserError

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer


@dataclass(kw_only=True, slots=True)
class LighthouseOptions:
    """Start a TorchFT Lighthouse and serve until SIGTERM or SIGINT. It logs on stderr."""

    bind: str = "127.0.0.1:29510"
    """HOST:PORT to listen on; port 0 takes a free one. Anybody who can reach it can evict islands: keep it private."""

    min_replicas: int = 1
    """Islands needed for a quorum."""

    join_timeout_ms: int = 1000
    """How long a quorum waits for islands that heartbeat but have not asked for it."""

    quorum_tick_ms: int = 100
    """How often the server looks whether a quorum is complete."""

    heartbeat_timeout_ms: int = 5000
    """An island without a heartbeat for this long counts as gone."""

    port_file: Path | None = None
    """Write the port here once the server listens."""


def require_torchft() -> None:
    """Raise UserError where TorchFT is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise UserError(
            "lighthouse: torchft is not installed (it publishes no aarch64 wheel); run `torchtitan-diloco lighthouse` "
            'on an x86-64 machine and set lighthouse.address to it, or train with semi_sync.method = "none"'
        )


def serve(options: LighthouseOptions) -> None:
    """Run the server until SIGTERM or SIGINT.

    Raises UserError: torchft missing, port taken, address not ours.
    """
    require_torchft()
    os.environ.setdefault(
        "RUST_LOG", "warn"
    )  # at TorchFT's default, "info", it logs every quorum: gigabytes a week
    # Blocked before the server's threads exist, so that all of them inherit it and only sigwait takes these signals.
    stop = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    try:
        _serve_until(stop, options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_until(stop: set[signal.Signals], options: LighthouseOptions) -> None:
    server = _listen(options)
    try:
        # The server names its host in the address even when bound to 127.0.0.1; only the port is of use.
        port = server.address().rpartition(":")[2].rstrip("/")
        if options.port_file is not None:
            write_port(options.port_file, port)
        signal.sigwait(stop)
    finally:
        server.shutdown()


def main(argv: Sequence[str]) -> int:
    """The sub-command; returns the exit code."""
    serve(tyro.cli(LighthouseOptions, args=list(argv), prog="torchtitan-diloco lighthouse"))
    return 0


def _listen(options: LighthouseOptions) -> "LighthouseServer":
    host, _, port = options.bind.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--bind {options.bind}: not HOST:PORT; for instance 127.0.0.1:29510, or 127.0.0.1:0 for a free port"
        )
    from torchft.coordination import LighthouseServer

    try:
        return LighthouseServer(
            bind=options.bind,
            min_replicas=options.min_replicas,
            join_timeout_ms=options.join_timeout_ms,
            quorum_tick_ms=options.quorum_tick_ms,
            heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        )
    except RuntimeError as error:
        if "in use" in str(error):
            raise UserError(
                f"--bind {options.bind}: port {port} is taken on this machine; give another --bind HOST:PORT, "
                f"or {host}:0 for a free port"
            ) from None
        raise UserError(
            f"--bind {options.bind}: cannot listen there: {error}; give another --bind HOST:PORT"
        ) from None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
