"""Islands whose only way out is their site's proxy (FR-47: NAT and firewalls between clusters)."""

import pytest

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.site_proxies import ConnectProxy, PlainProxy
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.chunks import CHUNK
from torchtitan_diloco.exchange.hub_link import HubLink
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.outer.policy import Member

SLOTS = 10
NAME = "hub.test"  # resolved by nobody but the proxy


def train(urls: list[str], sizes: tuple[int, ...], **transport: object) -> list[HubIsland]:
    islands = [
        HubIsland(i, urls, sizes=sizes, transport_config=TransportConfig(kind="hub", urls=urls, streams=2, **transport))  # type: ignore[arg-type]
        for i in range(2)
    ]  # fmt: skip
    together([lambda i=i: (i.join(), i.run(SLOTS), i.transport.leave("done")) for i in islands], 180)  # type: ignore[misc]
    for island in islands:
        assert [status for _, status in island.statuses] == ["committed"] * SLOTS
    return islands


@pytest.mark.timeout(240)
def test_training_over_https_ends_though_a_proxy_cuts_every_connection(
    make_hub, certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (1_100_000,)  # 4.4 MB at a time, for which no connection lives long enough
    plain = make_hub()
    undisturbed = train([plain.url], sizes)
    ca, cert, key = certificates(NAME)
    hub = make_hub(cert=cert, key=key)
    proxy = ConnectProxy({NAME: hub.port}, life_s=1.0, rate=4e6)
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    islands = train([f"https://{NAME}:{hub.port}"], sizes, ca_file=ca)
    proxy.close()
    assert islands[0].state.lineage == islands[1].state.lineage == undisturbed[0].state.lineage
    assert proxy.tunnels > 10 and proxy.cut >= 5, (proxy.tunnels, proxy.cut)
    assert any(island.transport._link._chunks.size < CHUNK for island in islands)  # type: ignore[union-attr]


def test_a_proxy_that_knows_get_put_and_post_only_is_enough(
    make_hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub()
    proxy = PlainProxy({NAME: hub.port}, ("GET", "PUT", "POST"))
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    islands = train([f"http://{NAME}:{hub.port}"], (1000, 3000))
    proxy.close()
    assert islands[0].state.lineage == islands[1].state.lineage
    assert {method for method, _ in proxy.seen} == {"GET", "PUT", "POST"}
    assert not any(status == 405 for _, status in proxy.seen)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_the_way_to_this_machine_and_to_what_no_proxy_names_is_direct(
    make_hub, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # where nothing listens
    hub = make_hub()
    islands = [HubIsland(i, [hub.url], islands=1) for i in range(1)]
    together([lambda: islands[0].join()], 20)
    islands[0].transport.leave("done")
    far = HubIsland(1, [f"http://{NAME}:{hub.port}"], islands=1, patience_s=0.1)
    with pytest.raises(Exception, match="Connection refused"):  # by the proxy
        far.join()


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "gopher://site:70")
    config = TransportConfig(kind="hub", urls=["https://hub.test"])
    with pytest.raises(UserError, match="HTTPS_PROXY"):
        HubLink(config, RUN, Member(0, "a"), 1, TokenBucket(0.0))


@pytest.mark.parametrize("proxy", ["http://me:hunter2@host:abc", "nonsense://me:hunter2@host:1"])
def test_a_proxy_that_cannot_be_is_refused_in_one_sentence_that_keeps_its_password(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    config = TransportConfig(kind="hub", urls=["https://hub.example.org"])
    with pytest.raises(UserError, match="correct HTTPS_PROXY") as caught:
        HubLink(config, RUN, Member(0, "a"), 1, TokenBucket(0))
    assert "hunter2" not in str(caught.value)
