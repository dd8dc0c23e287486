"""A finished island that stays for a lost one says so: it would look hung."""

import logging
from types import SimpleNamespace

import pytest

from torchtitan_diloco.exchange import gloo
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.semi_sync import assembly
from torchtitan_diloco.semi_sync.assembly import Assembly

SAID = "this island has finished; it waits, at most 0.3 s, for islands [1], which have not"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gloo, "LINGER_S", 0.3)
    monkeypatch.setattr(assembly, "LINGER_S", 0.3)
    caplog.set_level(logging.INFO)


def gateway(known: set[int], monkeypatch: pytest.MonkeyPatch) -> GlooTransport:
    transport = GlooTransport.__new__(GlooTransport)
    monkeypatch.setattr(transport, "_members", SimpleNamespace(peers=[]), raising=False)
    monkeypatch.setattr(transport, "_stop", SimpleNamespace(is_set=lambda: False), raising=False)
    monkeypatch.setattr(transport, "_note", lambda waiting: None, raising=False)
    transport._known, transport._departed, transport._slot = known, set(), 5
    return transport


def test_gloo_says_once_whom_it_stays_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway(set(), monkeypatch)._linger()
    assert not caplog.messages
    gateway({1}, monkeypatch)._linger()
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(SAID)


def test_sync_says_whom_it_stays_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Assembly.__new__(Assembly)
    monkeypatch.setattr(alone, "_stay", lambda expected, limit_s: None, raising=False)
    alone._known, alone.members = {0}, {0: {}}
    alone.linger()
    assert not caplog.messages
    alone._known = {0, 1}
    alone.linger()
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(SAID)
