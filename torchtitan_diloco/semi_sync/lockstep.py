"""Opens an island's links to the others, one for each rank, for methods that act within inner steps."""

from datetime import timedelta

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.lockstep import Lockstep
from torchtitan_diloco.island.group import IslandGroup


def open_lockstep(
    island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, group: IslandGroup
) -> Lockstep:
    """Called on all ranks together. Raises UserError, on each of them."""
    try:
        from torchtitan_diloco.exchange.managed import ManagedLockstep
    except ImportError as error:
        raise UserError(
            'semi_sync.method = "sync" needs torchft, which has no wheel for this machine\'s architecture; build it from '
            "source or choose another method"
        ) from error
    from torchtitan_diloco.address import advertised, route_to
    from torchtitan_diloco.exchange.bulk import serve_store
    from torchtitan_diloco.listening import bind

    def own_address(host: str) -> str:
        """``host`` on the gateway's node; on another node of the island the address that it reaches others from."""
        try:
            bind(host, 0).close()
        except UserError:
            return route_to(lighthouse.address)
        return host

    def link(store: str, host: str, held: object = None) -> Lockstep:
        return ManagedLockstep(
            held=held,
            rank=group.rank,
            ranks=group.size,
            store=store,
            host=host,
            listen=own_address(host),
            island=island,
            lighthouse=lighthouse,
            timeout_s=transport.exchange_timeout_s,
        )

    mine: Lockstep | None = None
    where: tuple[str, str] | UserError | None = None
    if group.is_gateway:  # the others find its ManagerServer through the store
        try:
            if not lighthouse.address:
                raise UserError(
                    "lighthouse.address is empty: start one with `torchtitan-diloco lighthouse` and give its address "
                    "(http://HOST:PORT)"
                )
            host = advertised(island.advertise, lighthouse.address)
            held, store = serve_store(host, island.port, timedelta(seconds=transport.exchange_timeout_s))
            mine = link(store, host, held)
            where = store, host
        except UserError as error:
            where = error
        except Exception as error:  # noqa: BLE001 - TorchFT's have many types, and every rank must learn of it
            where = UserError(
                f"lighthouse.address = {lighthouse.address}: no Lighthouse answers there ({error}); start one with "
                "`torchtitan-diloco lighthouse` or correct the address"
            )
    where = group.tell(where)
    if isinstance(where, UserError):
        raise where
    assert where is not None
    return mine or link(*where)
