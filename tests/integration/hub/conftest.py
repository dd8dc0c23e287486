"""A hub that listens, for tests of what reaches it and how."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.certificates import make_certificates
from tests.helpers.hub_islands import RUN
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer

MakeHub = Callable[..., HubServer]
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def make_hub() -> Iterator[MakeHub]:
    """Starts hubs on free ports of loopback; each ends with the test."""
    started = []

    def make(host: str = "127.0.0.1", port: int = 0, **options: Any) -> HubServer:
        server = HubServer(host, port, RUN, options.pop("rules", Rules(lease_s=3.0)), **options)
        started.append((server, server.in_thread()))
        return server

    yield make
    for server, thread in started:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, str]]:
    """(authority, certificate, key) for a host."""
    return lambda host: make_certificates(tmp_path_factory.mktemp("certificates"), host)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
