"""A hub that listens: the service in uvicorn, on a socket that is bound before anything is promised."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.crew import Crew, FarParts
from torchtitan_diloco.hub.hub import Hub, Rules
from torchtitan_diloco.hub.parts import Parts
from torchtitan_diloco.hub.service import Service
from torchtitan_diloco.hub.serving import server_of
from torchtitan_diloco.hub.spool import SpoolReader
from torchtitan_diloco.hub.store import FileStore, NoStore
from torchtitan_diloco.hub.tls import check_certificate
from torchtitan_diloco.hub.worker_process import Crewed, Place, crew_of
from torchtitan_diloco.listening import bind, url_of

logger = logging.getLogger(__name__)


class HubServer:
    """``run`` serves until ``stop`` is called, in any thread, or something makes it impossible to go on."""

    def __init__(
        self, host: str, port: int, run_id: str, rules: Rules, folder: Path | None = None, every: int = 1,
        access: Access | None = None, cert: str = "", key: str = "", spools: Sequence[Path] = (),
        spool_timeout_s: float = 86400.0, crewed: Crewed | None = None, tokens: str = "",
    ) -> None:  # fmt: skip
        """folder: of the durable state; without one, nothing outlasts the process. cert, key: PEM files, for https. spools:
        folders that islands are heard through as well, and the silence after which one of those is gone. crewed: the
        workers, if any; tokens: the file that those which are started here read.

        Raises UserError.
        """
        access = access or Access()
        access.require_loopback(host)
        check_certificate(cert, key)
        self._socket = bind(host, port, f"syncer.bind = {host}:{port}")
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(host, self.port, "https" if cert else "http")
        self._fault: BaseException | None = None
        self._crew: Crew | None = None
        parts: Parts | None = None
        if crewed is not None and (crewed.count or crewed.urls):
            if spools:
                raise UserError(
                    "syncer.spools cannot be had together with syncer.workers; remove one of them"
                )
            at = Place(host, port, run_id, str((folder or Path()) / "parts"), tokens, cert, key)
            self._crew = Crew(crew_of(crewed, at))
            parts = FarParts(self._crew)
        try:
            self.store = FileStore(folder, every, parts) if folder else NoStore()
            if self._crew is not None:
                self._crew.begin(self.store.epoch)
            hub = self._hub = Hub(rules, self.store, workshop=self._crew)
        except BaseException:
            if self._crew is not None:
                self._crew.close()
            raise
        if hub.state is not None:
            logger.info("going on with the state of slot %d", hub.state.slot)
        service = Service(hub, run_id, self._broken, access)
        service.beside = [
            SpoolReader(spool, service, run_id, spool_timeout_s, self._broken).run for spool in spools
        ]
        self._server = server_of(service.app, cert, key)
        service.ending = lambda: self._server.should_exit

    def run(self) -> None:
        """Raises what has made it impossible to go on."""
        try:
            self._server.run(sockets=[self._socket])
            if self._fault is None:
                self._hub.finish()
        finally:
            self._socket.close()
            try:
                self.store.close()
            except UserError as error:
                self._fault = self._fault or error
            finally:
                if self._crew is not None:
                    self._crew.close()
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
