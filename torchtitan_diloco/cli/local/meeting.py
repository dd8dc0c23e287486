"""Where the islands of a local run meet, by method and transport: at a Lighthouse, at a hub, or nowhere."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies

from torchtitan_diloco.cli.lighthouse import require_torchft
from torchtitan_diloco.cli.local import server
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


@dataclass(frozen=True, slots=True)
class Meeting:
    """setting: the key that tells islands the address. address: "" where `run` is to start one, of that kind.

    check: raises UserError where that, or the address, is of no use.
    """

    name: str
    setting: str
    address: str
    kind: Callable[[Path], server.Kind]
    check: Callable[[], None]


def meeting_place(config: RunConfig) -> Meeting | None:
    """None where the islands train on their own."""
    if config.semi_sync.method == "none":
        return None
    if config.semi_sync.method != "sync" and config.transport.kind in ("hub", "spool"):
        return _hub(config)
    return _lighthouse(config)


def _hub(config: RunConfig) -> Meeting:
    urls = config.transport.urls

    def check() -> None:
        folder = config.transport.dir
        if config.transport.kind == "spool" and (not folder or folder not in config.syncer.spools):
            raise UserError(
                'transport.kind = "spool": the islands of `run` are on this machine, as is the hub that it starts; '
                f"give both one folder, transport.dir and syncer.spools = [the same] (now {folder!r} and "
                f"{config.syncer.spools})"
            )
        # Behind a site's proxy, or with another address to fall back on, only the islands' own requests can tell.
        if len(urls) == 1 and not getproxies():
            server.require_reachable(urls[0], "transport.urls", "syncer FILE.toml --syncer.bind")

    return Meeting("hub", "transport.urls", ",".join(urls), server.hub, check)


def _lighthouse(config: RunConfig) -> Meeting:
    address = config.lighthouse.address

    def kind(folder: Path) -> server.Kind:
        return server.lighthouse(
            join_timeout_s=join_timeout_s(config), heartbeat_timeout_s=config.lighthouse.heartbeat_timeout_s
        )

    def check() -> None:
        if address:
            server.require_reachable(address, "lighthouse.address", "lighthouse --bind")
        else:
            require_torchft()

    return Meeting("Lighthouse", "lighthouse.address", address, kind, check)


def join_timeout_s(config: RunConfig) -> float:
    """How long a quorum waits for an island that beats and has not asked."""
    if config.semi_sync.method != "sync":
        return config.lighthouse.join_timeout_s
    # It is in its inner step, in which the others would wait for it anyway; without it they would leave it behind.
    return max(config.lighthouse.join_timeout_s, config.transport.exchange_timeout_s)
