"""A hub that speaks https: whom islands believe, and what is said where files or certificates are of no use."""

import re
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.hub_islands import HubIsland, together
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.tls import check_certificate, client_context


def island(url: str, ca_file: str, number: int = 0, **options: object) -> HubIsland:
    config = TransportConfig(kind="hub", urls=[url], ca_file=ca_file, streams=2)
    return HubIsland(number, [url], transport_config=config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_islands_exchange_over_https(make_hub, certificates, host: str) -> None:
    ca, cert, key = certificates(host)
    hub = make_hub(host, cert=cert, key=key)
    assert hub.url.startswith("https://")
    islands = [island(hub.url, ca, i) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(4), i.transport.leave("done")) for i in islands], 60)  # type: ignore[misc]
    assert islands[0].state.lineage == islands[1].state.lineage
    assert [status for _, status in islands[0].statuses] == ["committed"] * 4


def test_ipv6_without_tls_too(make_hub) -> None:
    hub = make_hub("::1")
    assert hub.url.startswith("http://[::1]:")
    islands = [HubIsland(i, [hub.url]) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(3), i.transport.leave("done")) for i in islands], 60)  # type: ignore[misc]
    assert islands[0].state.lineage == islands[1].state.lineage


@pytest.mark.parametrize("wrong", ["another authority", "the system's", "another name"])
def test_a_certificate_that_does_not_convince_ends_the_island_at_once(
    make_hub, certificates, wrong: str
) -> None:
    ca, cert, key = certificates("192.0.2.1" if wrong == "another name" else "127.0.0.1")
    if wrong == "another authority":
        ca = certificates("127.0.0.1")[0]
    hub = make_hub(cert=cert, key=key)
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        island(hub.url, "" if wrong == "the system's" else ca).join()
    assert time.monotonic() - began < 5
    message = str(refused.value)
    assert message.startswith(f"transport.ca_file: the certificate of {hub.url} does not hold against ")
    assert "\n" not in message


def test_https_to_a_hub_without_a_certificate_waits_for_one(make_hub, certificates) -> None:
    hub = make_hub()
    with pytest.raises(Resumable, match=r"WRONG_VERSION_NUMBER|record layer"):
        island(hub.url.replace("http:", "https:"), certificates("127.0.0.1")[0], patience_s=0.1).join()


def test_the_documented_certificate_passes_openssl_s_strict_checks(certificates) -> None:
    ca, cert, key = certificates("127.0.0.1")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    client = client_context(ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # from Python 3.13 on, this is the default
    ends = [ssl.MemoryBIO() for _ in range(2)]
    talk = [
        client.wrap_bio(ends[0], ends[1], server_hostname="127.0.0.1"),
        server.wrap_bio(ends[1], ends[0], server_side=True),
    ]
    for _ in range(3):
        for end in talk:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert talk[0].getpeercert()


def test_files_that_are_of_no_use_are_named_with_their_setting(tmp_path: Path, certificates) -> None:
    _, cert, key = certificates("127.0.0.1")
    _, _, other = certificates("127.0.0.1")
    nothing = str(tmp_path / "nothing.pem")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate\n")
    for settings, says in (
        ((nothing, key), rf"syncer\.cert: {re.escape(nothing)} cannot be read \(No such file or directory\)"),
        ((cert, nothing), rf"syncer\.key: {re.escape(nothing)} cannot be read"),
        ((str(tmp_path), key), r"syncer\.cert: .* cannot be read \(Is a directory\)"),
        ((cert, other), r"syncer\.key: .* holds the key of another certificate"),
        ((str(rubbish), key), r"syncer\.cert: .* no certificate and key"),
        ((cert, ""), r"syncer\.cert: .* no certificate and key"),
        (("", key), r"syncer\.key: .* without syncer\.cert"),
    ):
        with pytest.raises(UserError, match=says):
            check_certificate(*settings)
    for ca_file in (nothing, str(rubbish)):
        with pytest.raises(UserError, match=r"transport\.ca_file: "):
            client_context(ca_file)


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(tmp_path: Path, certificates) -> None:
    _, cert, key = certificates("127.0.0.1")
    locked = str(tmp_path / "locked.key")
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked], check=True
    )
    with pytest.raises(UserError, match="has a passphrase"):
        check_certificate(cert, locked)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_tokens_a_hub_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(UserError, match=r"syncer\.bind = .*: beyond loopback a hub needs syncer\.tokens"):
        HubServer(host, 0, "run", Rules())
    Access({}).require_loopback(host)
