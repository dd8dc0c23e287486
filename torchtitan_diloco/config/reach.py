"""Whether something listens at lighthouse.address: asked before anything that takes seconds to import."""

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError

WAIT_S = 30.0
"""How long an island waits for a Lighthouse that was started with it, or is being started again."""
NO_SPOOL_FOLDER = (
    'transport.dir is empty: with transport.kind = "spool" it names the folder that is mirrored to the hub'
)
TRY_S = 3.0
RETRY_S = 0.5


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of http://HOST:PORT or HOST:PORT; None for anything else."""
    try:
        parts = urlsplit(address if "//" in address else f"http://{address}")
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def why_unreachable(address: str, timeout_s: float = TRY_S) -> str:
    """One try of a connection: "" where something accepts it, else the reason."""
    place = host_and_port(address)
    if place is None:
        return "not an address"
    try:
        socket.create_connection(place, timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def no_spool_folder(config: RunConfig) -> bool:
    """Whether an island of this configuration would lack the folder that it exchanges through."""
    return config.transport.kind == "spool" and needs_hub(config) and not config.transport.dir


def await_lighthouse(
    config: RunConfig,
    say: Callable[[str], None],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for a Lighthouse where this run needs one; ``say`` takes one line when it is not there at once.

    Raises UserError when there is none within ``WAIT_S`` or lighthouse.patience_s, whichever is shorter.
    """
    if no_spool_folder(config):
        raise UserError(NO_SPOOL_FOLDER)
    if config.transport.kind == "hub" and needs_hub(config) and not config.transport.urls:
        # Whether it answers is seen when the island joins: a site's proxy may be the only way to it.
        raise UserError(
            "transport.urls is empty: start a hub with `torchtitan-diloco syncer FILE.toml` and give its address "
            '(["http://HOST:PORT"])'
        )
    if not needs_lighthouse(config):
        return
    address = config.lighthouse.address
    if not address:
        raise UserError(
            "lighthouse.address is empty: start one with `torchtitan-diloco lighthouse` and give its address "
            '(http://HOST:PORT), or set semi_sync.method = "none" to train one island alone'
        )
    if host_and_port(address) is None:
        raise UserError(f"lighthouse.address = {address}: write it as http://HOST:PORT")
    limit_s = min(WAIT_S, config.lighthouse.patience_s)
    deadline, said = now() + limit_s, False
    while why := why_unreachable(address):
        if now() > deadline:
            raise UserError(
                f"lighthouse.address = {address}: no Lighthouse answers there within {limit_s:g} s ({why}); start one with "
                "`torchtitan-diloco lighthouse` or correct the address"
            )
        if not said:
            said = True
            say(f"waiting at most {limit_s:g} s for the Lighthouse at {address} (lighthouse.address): {why}")
        sleep(RETRY_S)


def needs_lighthouse(config: RunConfig) -> bool:
    """Only of methods and transports of our own is it known."""
    method = config.semi_sync.method
    return method == "sync" or (method in ("diloco", "local_sgd") and config.transport.kind == "gloo")


def needs_hub(config: RunConfig) -> bool:
    """Whether the islands of this run meet at a hub."""
    return config.semi_sync.method in ("diloco", "local_sgd") and config.transport.kind in ("hub", "spool")
