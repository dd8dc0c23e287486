"""How islands talk: the slot protocol, the transports that carry it, and healing."""

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.exchange.protocol import Merge
from torchtitan_diloco.exchange.transport import Transport, register_transport, transport_class

__all__ = ["Transport", "make_transport", "register_transport"]


def make_transport(
    island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
) -> Transport:
    """The transport that ``[transport] kind`` names. Raises UserError when it is unknown or cannot start."""
    from torchtitan_diloco.exchange import gloo, memory  # noqa: F401  (registers them)

    return transport_class(transport.kind)(island, lighthouse, transport, merge)
