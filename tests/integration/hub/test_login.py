"""Tokens: who may do what at a hub, and what an island's user is told."""

import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.hub_islands import RUN, HubIsland, together
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.access import FAILURES, Access
from torchtitan_diloco.hub.dial import EPOCH, INCARNATION, ISLAND
from torchtitan_diloco.hub.dial import RUN as RUN_HEADER
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.tokens import digest

TOKENS = {name: f"the-token-of-{name}" for name in ("island-0", "island-1", "operator", "reader")}


@pytest.fixture
def hub(make_hub) -> HubServer:
    return make_hub(access=Access({name: digest(token) for name, token in TOKENS.items()}))


def island(hub: HubServer, folder: Path, number: int, token: str, **options: Any) -> HubIsland:
    file = folder / f"token-{number}"
    file.write_text(token + "\n")
    file.chmod(0o600)
    config = TransportConfig(kind="hub", urls=[hub.url], token_file=str(file), streams=2)
    return HubIsland(number, [hub.url], transport_config=config, **options)


def ask(hub: HubServer, method: str, path: str, name: str | None = None, token: str = "") -> httpx.Response:
    secret = TOKENS[name] if name else token
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    who = {RUN_HEADER: RUN, ISLAND: "0", INCARNATION: "a"}
    return httpx.request(method, hub.url + path, headers=headers | who, trust_env=False)


def test_islands_with_their_tokens_train_and_readers_see_it(hub: HubServer, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    islands = [island(hub, tmp_path, i, TOKENS[f"island-{i}"]) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(4)) for i in islands], 60)  # type: ignore[misc]
    seen = ask(hub, "GET", "/status", "reader")
    status = seen.json()
    assert status["run"] == RUN and status["slot"] == 4
    assert [(i["island"], i["phase"]) for i in status["islands"]] == [(0, "member"), (1, "member")]
    assert [slot["status"] for slot in status["last"]] == ["committed"] * 4
    assert [f["version"] for f in status["fragments"]] == [4]
    assert len(seen.content) < 4000
    assert ask(hub, "GET", "/status", "operator").status_code == 200
    for island_ in islands:
        island_.transport.leave("done")
    written = caplog.text + seen.text + repr(islands) + repr(islands[0].transport.__dict__)
    assert not any(token in written for token in TOKENS.values())


@pytest.mark.parametrize("case", ["wrong", "another island's", "a reader's", "none"])
def test_a_token_that_does_not_let_in_ends_the_island_at_once(
    hub: HubServer, tmp_path: Path, case: str
) -> None:
    token = {
        "wrong": "no-token-of-this-hub",
        "another island's": TOKENS["island-1"],
        "a reader's": TOKENS["reader"],
    }
    stranger = HubIsland(0, [hub.url]) if case == "none" else island(hub, tmp_path, 0, token[case])
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        stranger.join()
    assert time.monotonic() - began < 5
    message = str(refused.value)
    assert message.startswith("transport.token_file (") and "island-0" in message and "\n" not in message
    assert not any(secret in message for secret in [*TOKENS.values(), "no-token-of-this-hub"])


def test_nobody_does_more_than_the_role_allows(hub: HubServer) -> None:
    for name in ("island-0", "island-1", None):
        assert ask(hub, "GET", "/status", name).status_code == 403
    for name in ("island-0", "reader", None):
        assert ask(hub, "POST", "/evict/0", name).status_code == 403
    for path in ("/state", "/state/0-0/anchor.0", "/slots/0/outcome?wait=0", "/slots/0/result"):
        for name in ("island-1", "reader", "operator", None):
            refused = ask(hub, "GET", path, name)
            assert (refused.status_code, refused.json()["kind"]) == (403, "forbidden"), (path, name)
            assert refused.headers[EPOCH].isdigit()
        assert ask(hub, "GET", path, "island-0").status_code != 403
    assert ask(hub, "POST", "/evict/0", "operator").status_code == 410


def test_an_island_that_an_operator_evicts_ends_and_may_be_started_again(
    hub: HubServer, tmp_path: Path
) -> None:
    islands = [island(hub, tmp_path, i, TOKENS[f"island-{i}"]) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(2)) for i in islands], 60)  # type: ignore[misc]
    assert ask(hub, "POST", "/evict/1", "operator").status_code == 200
    islands[1].offer(2)
    with pytest.raises(UserError, match="an operator has evicted island 1; start the island again"):
        islands[1].transport.result(2, 20.0)
    islands[0].run(4)  # without it
    assert islands[0].outcomes[-1].participants == (0,)
    islands[1].transport.leave("failure")
    again = island(hub, tmp_path, 1, TOKENS["island-1"], incarnation="b", started=1.0)
    again.join()
    assert again.state.lineage == islands[0].state.lineage
    for one in (islands[0], again):
        one.transport.leave("done")


def test_who_guesses_has_to_wait_and_the_right_token_is_not_looked_at_then(hub: HubServer) -> None:
    for _ in range(FAILURES):
        assert ask(hub, "GET", "/status", token="a-guess-at-the-token").status_code == 403
    for name in ("reader", None):
        answer = ask(hub, "GET", "/status", name)
        assert answer.status_code == 429 and 50 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["kind"] == "busy"
