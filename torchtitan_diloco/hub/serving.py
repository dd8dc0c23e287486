"""uvicorn, as a hub and its workers use it."""

import uvicorn
from starlette.types import ASGIApp

from torchtitan_diloco.hub.bulk import CHUNK_LIMIT
from torchtitan_diloco.hub.limits import HEADERS_LIMIT, Bounds, PatientProtocol

KEEP_ALIVE_S = 90  # an unused connection; longer than islands keep theirs


def server_of(app: ASGIApp, cert: str, key: str) -> uvicorn.Server:
    """cert, key: PEM files, for https; empty: plain HTTP."""
    return uvicorn.Server(
        uvicorn.Config(
            Bounds(app, CHUNK_LIMIT),
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
