"""How islands talk: the slot protocol, the transports that carry it, and healing."""

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.transport import MakeTransport, Transport, register_transport, transport_class

__all__ = ["Transport", "find_transport", "make_transport", "register_transport"]


def find_transport(kind: str) -> MakeTransport:
    """What makes the transport of this name. Raises UserError, listing what is registered, when it is unknown."""
    from torchtitan_diloco.exchange import gloo, hub, memory, spool  # noqa: F401  (registers them)

    return transport_class(kind)


def make_transport(
    island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
) -> Transport:
    """The transport that ``[transport] kind`` names. Raises UserError when it is unknown or cannot start."""
    return find_transport(transport.kind)(island, lighthouse, transport, merge)
