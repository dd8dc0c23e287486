"""A hub that listens: the service in uvicorn, on a socket that is bound before anything is promised."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from torchtitan_diloco.hub.hub import Hub, Rules
from torchtitan_diloco.hub.service import Service
from torchtitan_diloco.hub.spool import SpoolReader
from torchtitan_diloco.hub.store import FileStore, NoStore
from torchtitan_diloco.listening import bind, url_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 90  # an unused connection; longer than islands keep theirs


class HubServer:
    """``run`` serves until ``stop`` is called, in any thread, or something makes it impossible to go on."""

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        rules: Rules,
        folder: Path | None = None,
        every: int = 1,
        spools: Sequence[Path] = (),
        spool_timeout_s: float = 86400.0,
    ) -> None:
        """folder: of the durable state; without one, nothing outlasts the process. spools: folders that islands are heard
        through as well, and the silence after which one of those is gone. Raises UserError.
        """
        self._socket = bind(host, port, f"syncer.bind = {host}:{port}")
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(host, self.port)
        self.store = FileStore(folder, every) if folder else NoStore()
        self._fault: BaseException | None = None
        hub = Hub(rules, self.store)
        if hub.state is not None:
            logger.info("going on with the state of slot %d", hub.state.slot)
        service = Service(hub, run_id, self._broken)
        service.beside = [
            SpoolReader(spool, service, run_id, spool_timeout_s, self._broken).run for spool in spools
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(
                service.app,
                log_level="warning",
                access_log=False,
                ws="none",
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
