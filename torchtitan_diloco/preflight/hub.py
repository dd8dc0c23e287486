"""The hub: the way to it, its certificate, and whether it lets this island in. One request, which changes nothing there."""

import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.dial import EPOCH, INCARNATION, ISLAND, RUN, make_client
from torchtitan_diloco.hub.tls import client_context, distrust
from torchtitan_diloco.hub.tokens import read_token
from torchtitan_diloco.preflight.dial import ANSWER_S, CONNECT_S, why
from torchtitan_diloco.preflight.rows import Probe, Row, look

NOT_REACHED = "not reached"


class Stages:
    """How far a request has come: called by httpx with what its connection does."""

    def __init__(self) -> None:
        self.dialled = ""
        self.connected = self.encrypted = False

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("connect_tcp.started"):
            self.dialled = f"{info['host']}:{info['port']}"
        self.connected |= event.endswith("connect_tcp.complete")
        self.encrypted |= event.endswith("start_tls.complete")


def hub_probes(config: RunConfig) -> list[Probe]:
    urls = list(dict.fromkeys(config.transport.urls))
    if not urls:
        remedy = "start a hub with `torchtitan-diloco syncer FILE.toml` and give its address"
        empty = Row("hub", "out", "", "fail", "transport.urls is empty", remedy)
        return [Probe("hub", "out", "", remedy, lambda until: [empty])]

    def all_of_them(until: float) -> list[Row]:
        began = time.monotonic()
        found = look([_probe(config, url) for url in urls], until, began)
        each = [[row for row in found if row.place == url] for url in urls]
        usable = any(all(row.outcome == "ok" for row in rows) for rows in each)
        # Several addresses are several ways to one hub.
        return [
            Row(
                r.name,
                r.way,
                r.place,
                "warn" if usable and r.outcome == "fail" else r.outcome,
                r.seen,
                r.remedy,
            )
            for rows in each
            for r in rows
        ]

    return [Probe("hub", "out", urls[0], "", all_of_them)]


def _probe(config: RunConfig, url: str) -> Probe:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    remedy = (
        f"open outgoing TCP to {parts.hostname}:{port} at this site's firewall and incoming at the hub's, set HTTPS_PROXY "
        "where the site has a proxy, or start the hub (`torchtitan-diloco syncer`)"
    )
    return Probe("hub", "out", url, remedy, lambda until: _ask(config, url, remedy))


def _ask(config: RunConfig, url: str, remedy: str) -> list[Row]:
    transport, stages = config.transport, Stages()
    headers = {RUN: config.job.name, ISLAND: str(config.island.id), INCARNATION: f"preflight-{os.getpid()}"}
    secret = ""
    if transport.token_file:
        try:
            headers["authorization"] = f"Bearer {read_token(transport.token_file)}"
        except UserError as error:
            secret = str(error)
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    answer: httpx.Response | None = None
    failure: httpx.TransportError | None = None
    with make_client([url], headers, client_context(transport.ca_file), 1, timeout) as client:
        try:
            # Of a member that has not joined: the hub looks at token and run, and then says that it is a stranger.
            answer = client.get(f"{url}/slots/0/outcome", params={"wait": 0}, extensions={"trace": stages})
        except httpx.TransportError as error:
            failure = error
    return list(_rows(config, url, remedy, stages, answer, failure, secret))


def _rows(
    config: RunConfig, url: str, remedy: str, stages: Stages, answer: httpx.Response | None,
    failure: httpx.TransportError | None, secret: str,
) -> list[Row]:  # fmt: skip
    secure = urlsplit(url).scheme == "https"
    host = urlsplit(url).hostname
    beside = (
        ""
        if stages.dialled.rpartition(":")[0].strip("[]") in ("", host)
        else f" by way of the proxy at {stages.dialled}"
    )
    untrusted = distrust(failure, url, config.transport.ca_file)
    cut_in_tls = secure and stages.connected and not stages.encrypted and failure is not None
    names = ["hub", *(["hub: certificate"] if secure else []), "hub: token and run"]
    rows: list[Row] = []

    def say(outcome: str, seen: str, remedy: str = "") -> list[Row]:
        rows.append(Row(names[len(rows)], "out", url, outcome, seen, remedy))  # type: ignore[arg-type]
        return rows

    def give_up() -> list[Row]:
        while len(rows) < len(names):
            say("warn", NOT_REACHED)
        return rows

    if isinstance(failure, httpx.ProxyError):
        say(
            "fail",
            f"{beside.strip()}: {failure}",
            "have the site's proxy let this address through, or name it in NO_PROXY",
        )
        return give_up()
    if failure is not None and not stages.connected:
        cause = (
            "no answer: something on the way drops it"
            if isinstance(failure, httpx.TimeoutException)
            else _cause(failure)
        )
        say("fail", f"{cause}{beside}", remedy)
        return give_up()
    say("ok", f"connected{beside}")
    if untrusted is not None:
        seen, _, what = str(untrusted).rpartition("; ")
        say("fail", seen, what)
        return give_up()
    if cut_in_tls and failure is not None:
        silent = isinstance(failure, httpx.TimeoutException)
        seen = "it takes the connection and does not answer" if silent else f"no TLS: {_cause(failure)}"
        say(
            "fail",
            seen,
            "see whether a hub with syncer.cert listens there (else write http://), or a firewall cuts TLS",
        )
        return give_up()
    if secure:
        say("ok", f"holds against {config.transport.ca_file or 'the authorities of this system'}")
    if failure is not None or answer is None:
        silent = isinstance(failure, httpx.TimeoutException)
        seen = "it takes the connection and does not answer" if silent or failure is None else _cause(failure)
        return say("fail", seen, "see whether the hub is what listens there, and whether it still runs")
    return say(*_admission(config, answer, secret))


def _admission(config: RunConfig, answer: httpx.Response, secret: str) -> tuple[str, str, str]:
    """(outcome, what was seen, remedy)"""
    if not answer.headers.get(EPOCH, "").isdigit():
        return (
            "fail",
            f"it answers {answer.status_code}, and is no hub",
            "correct transport.urls, or start the hub there",
        )
    try:
        said = answer.json()
        kind, reason = str(said["kind"]), str(said["error"])
    except (ValueError, KeyError, TypeError):
        return (
            "fail",
            f"it answers {answer.status_code} without a reason",
            "use the same version here and at the hub",
        )
    if secret:
        seen, _, what = secret.rpartition("; ")
        return "fail", seen, what
    if kind == "stranger":
        return "ok", f"island {config.island.id} of run {config.job.name} is let in", ""
    if kind == "forbidden":
        remedy = (
            f"give transport.token_file with the token that syncer.tokens has for island-{config.island.id}"
        )
        return "fail", reason, remedy
    if kind == "refused":
        return "fail", f"{reason}, and job.name is {config.job.name}", "give the hub's job.name"
    return (
        "fail",
        reason,
        "wait, and try again" if kind == "busy" else "use the same version here and at the hub",
    )


def _cause(error: BaseException) -> str:
    """The system's own words are at the end of the chain."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return why(error)
