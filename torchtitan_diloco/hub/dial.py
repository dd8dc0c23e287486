"""How an island asks the hub: what every request says, and the way it takes. Imports nothing slow."""

from collections.abc import Mapping, Sequence
from ssl import SSLContext
from urllib.parse import urlsplit

import httpx

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.listening import is_loopback

RUN, ISLAND, INCARNATION = "x-diloco-run", "x-diloco-island", "x-diloco-incarnation"
EPOCH, CHECKSUM = "x-diloco-epoch", "x-diloco-xxh3"
KEPT_S = 60.0
"""How long an unused connection is kept: where bulk fills a link, opening another may cost a second."""


def make_client(
    urls: Sequence[str], headers: Mapping[str, str], trusted: SSLContext, connections: int, timeout: httpx.Timeout
) -> httpx.Client:  # fmt: skip
    """Through the site's proxy (HTTPS_PROXY and so on), except to this very machine.

    Raises UserError where the environment names a proxy that cannot be used.
    """
    limits = httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEPT_S
    )
    direct = {f"all://{host}": None for host in map(host_of, urls) if is_loopback(host)}
    try:
        return httpx.Client(headers=headers, verify=trusted, mounts=direct, limits=limits, timeout=timeout)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise UserError(
            f"the environment names a proxy that cannot be used ({error}); correct HTTPS_PROXY, HTTP_PROXY and "
            "ALL_PROXY, or name the hub in NO_PROXY"
        ) from None


def host_of(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host
