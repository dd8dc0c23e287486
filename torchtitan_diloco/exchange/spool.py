"""Transport for islands whose machines reach nothing: as with the hub, by files in a folder that an outsider mirrors."""

from pathlib import Path

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.hub import HubTransport
from torchtitan_diloco.exchange.hub_link import Link
from torchtitan_diloco.exchange.spool_link import NOTES_S, SpoolLink
from torchtitan_diloco.exchange.transport import Hello, register_transport


@register_transport("spool")
class SpoolTransport(HubTransport):
    """The slots, the joining and the healing are those of ``HubTransport``; only the link differs."""

    notes_s = NOTES_S
    withdraw_s = 10.0  # a mirror that is there takes some seconds, each way
    passes = 1  # what the run has committed meanwhile, the island learns with its first slot

    def __init__(
        self, island: IslandConfig, lighthouse: LighthouseConfig, transport: TransportConfig, merge: Merge
    ) -> None:
        if not transport.dir:
            raise UserError(
                'transport.dir is empty: with transport.kind = "spool" it names the folder that is mirrored to the hub'
            )
        super().__init__(island, lighthouse, transport, merge)

    def _require_address(self) -> None:
        """It needs none."""

    def _connect(self, hello: Hello) -> Link:
        holds = lambda: {"fragments": self._published.describe()["fragments"]}
        folder = Path(self._config.dir)
        return SpoolLink(folder, hello.run_id, self._member, hello.started, holds, self.notes_s)
