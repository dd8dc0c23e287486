"""FR-47 over a hub: the one direction that islands need, stage by stage, and who is let in."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.blocked import closed, dropping, silent
from tests.helpers.hub_islands import RUN
from tests.helpers.site_proxies import ConnectProxy, PlainProxy
from torchtitan_diloco.cli import preflight
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.tokens import digest
from torchtitan_diloco.preflight.network import network_rows
from torchtitan_diloco.preflight.rows import Row

LIMIT_S = 9.0
TOKEN = "the-token-of-island-1"
NAME = "hub.test"
Seen = dict[str, Row]


def tried(
    folder: Path, urls: list[str], token: str = TOKEN, run: str = RUN, ca_file: str = "", island: int = 1
) -> Seen:
    config = RunConfig()
    config.job.name, config.island.id, config.semi_sync.num_islands = run, island, 2
    config.transport.kind, config.transport.urls, config.transport.ca_file = "hub", urls, ca_file
    if token:
        file = folder / "token"
        file.write_text(token + "\n")
        file.chmod(0o600)
        config.transport.token_file = str(file)
    began = time.monotonic()
    rows = network_rows(config, config)
    assert time.monotonic() - began < LIMIT_S
    assert all(row.way == "out" and row.remedy for row in rows if row.outcome == "fail")
    return {row.name: row for row in rows}


def outcomes(rows: Seen) -> list[tuple[str, str]]:
    return [(name, row.outcome) for name, row in rows.items()]


@pytest.fixture
def secure(make_hub, certificates) -> tuple[str, str]:
    """(address, authority) of a hub with TLS and tokens."""
    ca, cert, key = certificates("127.0.0.1")
    hub = make_hub(access=Access({"island-1": digest(TOKEN)}), cert=cert, key=key)
    return hub.url, ca


def test_fr47_a_hub_that_lets_the_island_in_is_three_good_rows_and_nothing_changes_there(
    secure: tuple[str, str], tmp_path: Path
) -> None:
    rows = tried(tmp_path, [secure[0]], ca_file=secure[1])
    assert outcomes(rows) == [("hub", "ok"), ("hub: certificate", "ok"), ("hub: token and run", "ok")]
    assert rows["hub: token and run"].seen == f"island 1 of run {RUN} is let in"


@pytest.mark.parametrize(
    "wrong, seen, remedy",
    [
        (
            {"token": "another-token-of-somebody"},
            "does not know this token",
            "syncer.tokens has for island-1",
        ),
        ({"token": ""}, "asks for a token", "give transport.token_file"),
        ({"island": 0}, "may not act as island 0", "syncer.tokens has for island-0"),
        ({"run": "yesterday"}, f"this hub serves run {RUN}, and job.name is yesterday", "the hub's job.name"),
    ],
)
def test_who_is_not_let_in_is_told_why(
    secure: tuple[str, str], tmp_path: Path, wrong: dict, seen: str, remedy: str
) -> None:
    rows = tried(tmp_path, [secure[0]], ca_file=secure[1], **wrong)
    assert outcomes(rows) == [("hub", "ok"), ("hub: certificate", "ok"), ("hub: token and run", "fail")]
    row = rows["hub: token and run"]
    assert seen in row.seen and remedy in row.remedy and TOKEN not in repr(rows)


def test_a_token_file_that_cannot_be_read_is_told_beside_what_else_was_seen(
    secure: tuple[str, str], tmp_path: Path
) -> None:
    config_token = tmp_path / "token"
    rows = tried(tmp_path, [secure[0]], token="short", ca_file=secure[1])
    assert outcomes(rows)[-1] == ("hub: token and run", "fail") and rows["hub"].outcome == "ok"
    assert f"transport.token_file: {config_token}" in rows["hub: token and run"].seen


def test_a_certificate_that_does_not_convince_is_a_row_of_its_own(
    secure: tuple[str, str], tmp_path: Path
) -> None:
    rows = tried(tmp_path, [secure[0]])
    assert outcomes(rows) == [("hub", "ok"), ("hub: certificate", "fail"), ("hub: token and run", "warn")]
    assert "transport.ca_file" in rows["hub: certificate"].seen
    assert "authority that signed" in rows["hub: certificate"].remedy


def test_https_to_a_hub_without_certificate_and_http_to_one_with(
    make_hub, secure: tuple[str, str], tmp_path: Path
) -> None:
    rows = tried(tmp_path, [make_hub().url.replace("http:", "https:")])
    assert outcomes(rows)[:2] == [("hub", "ok"), ("hub: certificate", "fail")]
    assert "no TLS" in rows["hub: certificate"].seen
    rows = tried(tmp_path, [secure[0].replace("https:", "http:")])
    assert outcomes(rows) == [("hub", "ok"), ("hub: token and run", "fail")]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("how", ["dropped", "silent", "closed"])
def test_fr47_a_blocked_way_to_the_hub_is_named_in_time(tmp_path: Path, scheme: str, how: str) -> None:
    with dropping() as dropped, silent() as mute:
        port = {"dropped": dropped, "silent": mute, "closed": closed()}[how]
        rows = tried(tmp_path, [f"{scheme}://127.0.0.1:{port}"])
    row = next(row for row in rows.values() if row.outcome == "fail")
    if how == "silent":
        assert row.name == ("hub: certificate" if scheme == "https" else "hub: token and run")
        assert "takes the connection and does not answer" in row.seen
    else:
        assert row.name == "hub" and f"127.0.0.1:{port}" in row.remedy and "HTTPS_PROXY" in row.remedy
        assert ("drops it" if how == "dropped" else "refused") in row.seen
        assert all(other.outcome == "warn" for other in rows.values() if other is not row)


def test_fr47_the_way_through_the_sites_proxy_is_the_one_that_is_tried(
    make_hub,
    certificates: Callable[[str], tuple[str, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ca, cert, key = certificates(NAME)
    hub = make_hub(cert=cert, key=key)
    proxy = ConnectProxy({NAME: hub.port}, life_s=20.0, rate=1e9)
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    rows = tried(tmp_path, [f"https://{NAME}:{hub.port}"], token="", ca_file=ca)
    assert {row.outcome for row in rows.values()} == {"ok"}
    assert rows["hub"].seen == f"connected by way of the proxy at {proxy.url.removeprefix('http://')}"
    refused = tried(tmp_path, [f"https://elsewhere.test:{hub.port}"], token="", ca_file=ca)
    proxy.close()
    assert refused["hub"].outcome == "fail" and "403 Forbidden" in refused["hub"].seen
    assert "NO_PROXY" in refused["hub"].remedy
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed()}")
    rows = tried(tmp_path, [f"https://{NAME}:{hub.port}"], token="", ca_file=ca)
    assert rows["hub"].outcome == "fail" and "by way of the proxy" in rows["hub"].seen


def test_a_proxy_that_answers_by_itself_is_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = PlainProxy({}, ("GET",))
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    rows = tried(tmp_path, ["http://hub.test:80"])
    proxy.close()
    assert rows["hub: token and run"].seen == "it answers 405, and is no hub"


def test_of_several_ways_to_one_hub_one_that_works_is_enough(make_hub, tmp_path: Path) -> None:
    hub = make_hub()
    config = RunConfig()
    config.job.name, config.semi_sync.num_islands = RUN, 2
    config.transport.kind, config.transport.urls = "hub", [f"http://127.0.0.1:{closed()}", hub.url]
    rows = network_rows(config, config)
    assert [row.outcome for row in rows] == ["warn", "warn", "ok", "ok"]
    config.transport.urls = [f"http://127.0.0.1:{closed()}"] * 2
    assert [row.outcome for row in network_rows(config, config)] == ["fail", "warn"]


def test_no_address_and_no_exchange_are_rows_too() -> None:
    config = RunConfig()
    config.transport.kind, config.semi_sync.num_islands = "hub", 2
    (row,) = network_rows(config, config)
    assert (row.outcome, row.seen) == ("fail", "transport.urls is empty")
    config.semi_sync.method = "none"
    (row,) = network_rows(config, config)
    assert row.outcome == "ok" and "nothing is dialled" in row.seen


def test_the_table_keeps_addresses_whole_and_repeats_what_failed_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = "https://" + "a-long-name." * 8 + "example.org:29520"
    rows = [
        Row("hub", "out", place, "fail", "refused [by nobody]", "do something"),
        Row("spool", "here", "/x", "ok", "fine", "never said"),
    ]
    preflight.show(rows, Console(width=140, highlight=False))
    said = capsys.readouterr().out
    assert f"fail: hub (out -> {place}): refused [by nobody]; do something\n" in said
    assert "never said" not in said and said.endswith("1 of 2 failed\n")
