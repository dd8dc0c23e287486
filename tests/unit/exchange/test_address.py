"""What an island advertises to its peers; see the field cases in the tests' names."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from torchtitan_diloco.address import advertised
from torchtitan_diloco.errors import UserError

HERE, ELSEWHERE = "http://127.0.0.1:29510", "http://192.0.2.7:29510"


def test_an_address_and_an_interface_are_taken() -> None:
    assert advertised("192.0.2.1", ELSEWHERE) == "192.0.2.1"
    assert advertised("2001:db8::1", ELSEWHERE) == "2001:db8::1"
    assert advertised("lo", HERE) == "127.0.0.1"
    assert advertised("127.0.0.2", HERE) == "127.0.0.2"


def test_fr_09_the_hosts_name_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert advertised("", HERE) == "127.0.0.1"


def test_fr_09_a_name_that_does_not_resolve_is_refused_at_once() -> None:
    with pytest.raises(
        UserError, match=r"island\.advertise = no-such-host\.invalid: neither an interface .*lo.* nor a name"
    ):
        advertised("no-such-host.invalid", HERE)


@pytest.mark.parametrize("setting", ["127.0.0.1", "localhost", "lo", "::1"])
def test_fr_10_loopback_is_not_advertised_where_the_lighthouse_is_on_another_machine(setting: str) -> None:
    with pytest.raises(
        UserError, match=r"island\.advertise = .*: peers on other machines would dial themselves"
    ):
        advertised(setting, ELSEWHERE)


@pytest.mark.parametrize("setting", ["^lo", "^lo,docker0", "eth0,eth1", "=ib0"])
def test_fr_11_nccls_syntax_is_refused_with_a_hint(setting: str) -> None:
    with pytest.raises(UserError, match=r"NCCL's way to choose among interfaces; name one interface"):
        advertised(setting, HERE)


def test_fr_11_a_name_that_resolves_to_a_loopback_address_is_not_advertised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian's /etc/hosts has it for the machine's own name."""
    real = socket.getaddrinfo

    def debian(host: str, *arguments: object, **more: object) -> object:
        return real("127.0.1.1" if host == "node7" else host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with pytest.raises(UserError, match="would dial themselves"):
        advertised("node7", ELSEWHERE)


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    local = SimpleNamespace(family=socket.AF_INET6, address="fe80::1%ib0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [local]})
    with pytest.raises(UserError, match=r"island\.advertise = ib0: this interface has no address"):
        advertised("ib0", HERE)
