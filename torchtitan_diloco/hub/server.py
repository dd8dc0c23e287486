"""A hub that listens: the service in uvicorn, on a socket that is bound before anything is promised."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.bulk import CHUNK_LIMIT
from torchtitan_diloco.hub.hub import Hub, Rules
from torchtitan_diloco.hub.limits import HEADERS_LIMIT, Bounds, PatientProtocol
from torchtitan_diloco.hub.service import Service
from torchtitan_diloco.hub.spool import SpoolReader
from torchtitan_diloco.hub.store import FileStore, NoStore
from torchtitan_diloco.hub.tls import check_certificate
from torchtitan_diloco.listening import bind, url_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 90  # an unused connection; longer than islands keep theirs


class HubServer:
    """``run`` serves until ``stop`` is called, in any thread, or something makes it impossible to go on."""

    def __init__(
        self, host: str, port: int, run_id: str, rules: Rules, folder: Path | None = None, every: int = 1,
        access: Access | None = None, cert: str = "", key: str = "", spools: Sequence[Path] = (),
        spool_timeout_s: float = 86400.0,
    ) -> None:  # fmt: skip
        """folder: of the durable state; without one, nothing outlasts the process. cert, key: PEM files, for https. spools:
        folders that islands are heard through as well, and the silence after which one of those is gone.

        Raises UserError.
        """
        access = access or Access()
        access.require_loopback(host)
        check_certificate(cert, key)
        self._socket = bind(host, port, f"syncer.bind = {host}:{port}")
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(host, self.port, "https" if cert else "http")
        self.store = FileStore(folder, every) if folder else NoStore()
        self._fault: BaseException | None = None
        hub = Hub(rules, self.store)
        if hub.state is not None:
            logger.info("going on with the state of slot %d", hub.state.slot)
        service = Service(hub, run_id, self._broken, access)
        service.beside = [
            SpoolReader(spool, service, run_id, spool_timeout_s, self._broken).run for spool in spools
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Bounds(service.app, CHUNK_LIMIT),
                http=PatientProtocol,
                h11_max_incomplete_event_size=HEADERS_LIMIT,
                ssl_certfile=cert or None,
                ssl_keyfile=key or None,
                log_level="warning",
                access_log=False,
                ws="none",
                proxy_headers=False,  # whoever asks could name another address than its own
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    def run(self) -> None:
        """Raises what has made it impossible to go on."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.store.close()
        if self._fault is not None:
            raise self._fault

    def in_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, daemon=True, name="hub")
        thread.start()
        return thread

    def stop(self) -> None:
        self._server.should_exit = True

    def _broken(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._server.should_exit = True
