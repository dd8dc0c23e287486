"""Workers that are started by themselves: whom they serve, and what is said where a hub and its workers do not fit."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import xxhash

from tests.helpers.hub_islands import RUN, HubIsland, together
from tests.helpers.hub_process import HubProcess
from tests.helpers.hub_proxy import FAULTS, HubProxy, at_random
from torchtitan_diloco.config.own import CodecConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.hub_link import HubLink
from torchtitan_diloco.exchange.pace import TokenBucket
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.bulk import CHECKSUM
from torchtitan_diloco.hub.crew import Worker
from torchtitan_diloco.hub.dial import INCARNATION, ISLAND
from torchtitan_diloco.hub.dial import RUN as RUN_HEADER
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.parts import Parts
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.store import Fenced
from torchtitan_diloco.hub.tokens import read_tokens
from torchtitan_diloco.hub.worker import START
from torchtitan_diloco.hub.worker_process import Crewed, Place, WorkerServer
from torchtitan_diloco.outer.policy import Member

SECRET, WRONG = "the-secret-of-the-workers", "not-the-secret-of-them"
TOKENS = {name: f"the-token-of-{name}" for name in ("island-0", "island-1")}
SIZES = (1000, 300, 700, 50)
INT8 = CodecConfig(wire="int8", error_feedback=True)


def private(path: Path, content: str) -> str:
    path.write_text(content)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return private(tmp_path / "tokens.toml", "".join(f'{who} = "{token}"\n' for who, token in TOKENS.items()))


# Where a test has both, it names this one before `make_hub`, whose hub then ends first.
@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[Callable[..., WorkerServer]]:
    started: list[tuple[WorkerServer, threading.Thread]] = []

    def make(name: str = "worker", port: int = 0, **place: Any) -> WorkerServer:
        server = WorkerServer(Place("127.0.0.1", port, RUN, str(tmp_path / name / "parts"), **place), SECRET)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        started.append((server, thread))
        return server

    yield make
    for server, thread in started:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def say(worker: WorkerServer, path: str, secret: str, start: str, run: str = RUN) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {secret}", START: start, RUN_HEADER: run}
    body = {"serial": 1, "uploads": [], "drop": []}
    answer = httpx.post(worker.url + path, json=body, headers=headers, trust_env=False)
    return answer.status_code, answer.text


def test_a_worker_serves_one_start_of_one_hub_of_its_run_that_knows_the_secret(make_worker) -> None:
    worker = make_worker()
    begin, sync = "/worker/begin", "/worker/sync"
    assert say(worker, begin, WRONG, "5 a")[0] == 403
    assert say(worker, begin, SECRET, "5 a", "another")[0] == 409
    assert say(worker, sync, SECRET, "5 a")[0] == 401, "no hub has begun with it"
    assert say(worker, begin, SECRET, "5 a")[0] == 200
    assert say(worker, begin, SECRET, "5 a")[0] == 200, "it may be said twice"
    assert say(worker, sync, SECRET, "5 a")[0] == 200
    assert say(worker, sync, WRONG, "5 a")[0] == 403
    assert say(worker, sync, SECRET, "5 a", "another")[0] == 409
    for start in ("4 b", "5 b", "", "x"):
        status, text = say(worker, begin, SECRET, start)
        assert status == 412 and "a later start of the hub, number 5, has this worker" in text
    assert say(worker, begin, SECRET, "6 b")[0] == 200
    assert say(worker, sync, SECRET, "5 a")[0] == 412
    assert say(worker, sync, SECRET, "6 b")[0] == 200


def test_what_a_hub_had_at_a_worker_is_gone_with_the_next_start_of_it(make_worker, tmp_path: Path) -> None:
    server = make_worker()
    old, new = (Worker(server.url, server.url, RUN, SECRET) for _ in range(2))
    old.begin("1 a")
    name, tensor = "anchor.0", torch.ones(8)
    folder = tmp_path / "worker" / "parts"
    entry = Parts(folder).write("anchor.0-v0-x.safetensors", name, tensor)
    handle = old.handle()
    assert old.do("load", name=name, entry=entry, key=handle.key)["numel"] == 8
    new.begin("2 b")
    with pytest.raises(Fenced, match="a later start of the hub, number 2"):
        old.do("write", file="f", name=name, key=handle.key)
    who = {RUN_HEADER: RUN, ISLAND: "0", INCARNATION: "a"}
    answer = httpx.get(handle.place, params={"offset": 0, "size": 8}, headers=who, trust_env=False)
    assert answer.status_code == 410
    assert not (folder / "f").exists()
    damaged = {**entry, "xxh3_128": "0"}
    with pytest.raises(ValueError, match="does not match its checksum"):
        new.do("load", name=name, entry=damaged, key="k")
    for worker in (old, new):
        worker.close()


def test_an_island_brings_and_takes_only_what_the_hub_has_told_the_worker(make_worker, tokens: str) -> None:
    server = make_worker(tokens=tokens)
    hub = Worker(server.url, server.url, RUN, SECRET)

    def ask(method: str, path: str, island: int = 0, token: str = "", incarnation: str = "a") -> int:
        secret = token or TOKENS[f"island-{island}"]
        who = {
            RUN_HEADER: RUN,
            ISLAND: str(island),
            INCARNATION: incarnation,
            "authorization": f"Bearer {secret}",
        }
        chunk = bytes(8)
        arguments: dict[str, Any] = {"params": {"offset": 0, "size": 8}}
        if method == "PUT":
            arguments["content"] = chunk
            who[CHECKSUM] = xxhash.xxh3_64_hexdigest(chunk)
        return httpx.request(method, server.url + path, headers=who, trust_env=False, **arguments).status_code

    assert ask("GET", "/parts/anything") == 503, "no hub has begun with it"
    hub.begin("1 a")
    payload, anchor = (hub.upload(kind, 8, Member(0, "a")) for kind in ("payload", "anchor"))
    paths = [f"/parts/{upload.handle.key}" for upload in (payload, anchor)]
    assert ask("PUT", paths[0]) == 410, "the worker has not heard of it"

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(hub.sync())
        for path in paths:
            assert ask("PUT", path, token=SECRET) == 403
            assert ask("PUT", path, island=1) == 410
            assert ask("PUT", path, incarnation="b") == 410
            assert ask("GET", path) == 410, "nothing has come"
            assert ask("PUT", path) == 200
        assert loop.run_until_complete(hub.sync())
        assert payload.complete and anchor.complete and anchor.digest
        assert ask("GET", paths[0]) == 410, "an island's contribution is nobody else's"
        assert ask("GET", paths[1], island=1) == 200
        assert ask("GET", paths[1], token=WRONG) == 403
        del payload, anchor
        loop.run_until_complete(hub.sync())
        assert ask("GET", paths[1]) == 410, "nobody needs it any more"
    finally:
        loop.close()
        hub.close()


@pytest.mark.timeout(120)
def test_workers_on_other_hosts_over_https_with_tokens(
    make_worker, certificates, tokens: str, tmp_path: Path
) -> None:
    ca, cert, key = certificates("127.0.0.1")
    secret = private(tmp_path / "secret", SECRET + "\n")
    workers = [make_worker(f"w{k}", tokens=tokens, cert=cert, key=key) for k in range(2)]

    def hub() -> HubServer:
        crewed = Crewed(urls=[w.url for w in workers], secret=secret, ca_file=ca)
        access = Access(read_tokens(tokens))
        return HubServer(
            "127.0.0.1", 0, RUN, Rules(), tmp_path / "hub", access=access, cert=cert, key=key, crewed=crewed
        )

    def islands(url: str, incarnation: str) -> list[HubIsland]:
        files = [private(tmp_path / f"token-{i}", TOKENS[f"island-{i}"]) for i in range(2)]
        configs = [
            TransportConfig(kind="hub", urls=[url], ca_file=ca, token_file=file, streams=2) for file in files
        ]
        return [
            HubIsland(
                i,
                [url],
                2,
                SIZES,
                INT8,
                transport_config=config,
                incarnation=incarnation,
                started=len(incarnation),
            )
            for i, config in enumerate(configs)
        ]

    first = hub()
    serving = first.in_thread()
    before = islands(first.url, "a")
    together([lambda i=i: (i.join(), i.run(6), i.transport.leave("done")) for i in before])
    assert before[0].state.lineage == before[1].state.lineage
    first.stop()
    serving.join(20)
    held = [
        {path.name.partition("-")[0] for path in (tmp_path / f"w{k}" / "parts").glob("anchor*")}
        for k in range(2)
    ]
    assert held == [{"anchor.0", "anchor.3"}, {"anchor.1", "anchor.2"}], "1050 and 1000 values"
    second = hub()
    serving = second.in_thread()
    after = islands(second.url, "bb")  # with nothing: what they take is from the workers' folders
    together([lambda i=i: (i.join(), i.run(9), i.transport.leave("done")) for i in after])
    second.stop()
    serving.join(20)
    assert after[0].state.lineage == after[1].state.lineage
    assert [status for _, status in after[0].statuses] == ["committed"] * 3


@pytest.mark.timeout(240)
def test_faults_of_the_network_to_a_worker_change_no_bit(make_worker, make_hub, tmp_path: Path) -> None:
    """Of islands' bulk and of the hub's own requests some get lost, are cut, delayed, or come twice and late."""
    quiet: HubServer = make_hub(rules=Rules(lease_s=30.0))
    secret, worker = private(tmp_path / "secret", SECRET), make_worker()

    def run_all(hub: HubServer) -> list[HubIsland]:
        islands = [HubIsland(i, [hub.url], 2, SIZES, INT8) for i in range(2)]
        together([lambda i=i: (i.join(), i.run(40), i.transport.leave("done")) for i in islands], 200)
        return islands

    reference = run_all(quiet)[0]
    with HubProxy(worker.port, at_random(3, 0.01)).running() as bad:
        crewed = Crewed(urls=[bad.url], secret=secret)
        hub = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=30.0), tmp_path / "hub", crewed=crewed)
        serving = hub.in_thread()
        try:
            islands = run_all(hub)
        finally:
            hub.stop()
            serving.join(20)
    print("seed 3:", dict(bad.done))
    assert len(set(FAULTS) & set(bad.done)) >= 5
    for island in islands:
        assert island.state.describe() == reference.state.describe()
        for name, tensor in island.state.tensors().items():
            assert torch.equal(tensor, reference.state.tensors()[name])
        assert {status for _, status in island.statuses} <= {"committed", "behind"}


def test_a_worker_holds_what_the_hub_needs_and_no_more(make_worker, make_hub, tmp_path: Path) -> None:
    """Anchor, momentum and residual of each fragment, however many slots there were; on the disk too."""
    worker = make_worker()
    secret = private(tmp_path / "secret", SECRET)
    hub: HubServer = make_hub(folder=tmp_path / "hub", crewed=Crewed(urls=[worker.url], secret=secret))
    islands = [HubIsland(i, [hub.url], 2, SIZES, INT8) for i in range(2)]
    together([lambda i=i: (i.join(), i.run(20), i.transport.leave("done")) for i in islands])
    held, folder = worker.service._held, tmp_path / "worker" / "parts"
    counts = lambda: (len(held.tensors), len(held.residuals), len(held.arrivals), len(list(folder.iterdir())))
    end = time.monotonic() + 20
    while counts() != (8, 4, 0, 12):
        assert time.monotonic() < end, counts()
        time.sleep(0.1)
    assert held.digests == {}


@pytest.mark.timeout(120)
def test_processes_of_its_own_over_https_with_tokens(
    make_hub, certificates, tokens: str, tmp_path: Path
) -> None:
    """The certificate names the hub, not the loopback address by which the hub itself reaches them."""
    ca, cert, key = certificates("localhost")
    access = Access(read_tokens(tokens))
    hub = make_hub(
        access=access, cert=cert, key=key, crewed=Crewed(2), tokens=tokens, folder=tmp_path / "hub"
    )
    files = [private(tmp_path / f"token-{i}", TOKENS[f"island-{i}"]) for i in range(2)]
    url = f"https://localhost:{hub.port}"
    islands = [
        HubIsland(i, [url], 2, SIZES, INT8, transport_config=TransportConfig(
            kind="hub", urls=[url], ca_file=ca, token_file=file, streams=2))
        for i, file in enumerate(files)
    ]  # fmt: skip
    together([lambda i=i: (i.join(), i.run(5), i.transport.leave("done")) for i in islands])
    assert islands[0].state.lineage == islands[1].state.lineage and islands[0].state.slot == 5


def test_a_hub_and_workers_that_do_not_fit_are_told_apart(make_worker, make_hub, tmp_path: Path) -> None:
    worker = make_worker()
    wrong = private(tmp_path / "wrong", WRONG)
    with pytest.raises(
        UserError, match=r"^syncer.worker_urls: the worker .* refuses this hub .*syncer.worker_secret$"
    ):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(urls=[worker.url], secret=wrong))
    open_to_all = tmp_path / "open"
    open_to_all.write_text(SECRET)
    open_to_all.chmod(0o644)
    with pytest.raises(UserError, match=r"^syncer.worker_secret: others than its owner .*chmod 600"):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(urls=[worker.url], secret=str(open_to_all)))
    short = private(tmp_path / "short", "short")
    with pytest.raises(UserError, match=r"^syncer.worker_secret: .* must hold a token of at least 16"):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(urls=[worker.url], secret=short))
    with pytest.raises(UserError, match=r"^syncer.worker_port = .*cannot listen on .*choose another"):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(1, worker.port))
    with pytest.raises(UserError, match=r"^syncer.spools cannot be had together with"):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(1), spools=[tmp_path])


def test_a_worker_that_is_not_there_ends_the_hub_so_that_it_can_be_started_again(
    make_hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_diloco.hub.crew.LOST_S", 0.5)
    secret = private(tmp_path / "secret", SECRET)
    with pytest.raises(Resumable, match=r"worker http://127.0.0.1:\d+ is lost \(not reached for 0.5 s"):
        make_hub(folder=tmp_path / "hub", crewed=Crewed(urls=["http://127.0.0.1:1"], secret=secret))


def test_an_island_does_not_send_its_token_where_it_could_be_read(certificates) -> None:
    ca, _, _ = certificates("127.0.0.1")
    config = TransportConfig(kind="hub", urls=["https://127.0.0.1:1"], ca_file=ca)
    link = HubLink(config, RUN, Member(0, "a"), 1, TokenBucket(0.0))
    with pytest.raises(Refusal, match="token could be read on the way"):
        link.put("http://127.0.0.1:2/parts/x", torch.zeros(8, dtype=torch.uint8), [(0, 8)], lambda size: None)
    link.close()


@pytest.mark.timeout(120)
def test_the_command_of_a_worker(tmp_path: Path) -> None:
    """A hub and a worker as users start them; the worker is killed and started again, and so is the hub."""
    secret = private(tmp_path / "secret", SECRET)
    for name in ("worker", "hub"):
        (tmp_path / name).mkdir()
    worker = HubProcess(tmp_path / "worker", "--worker", worker_secret=secret)
    worker.start()
    hub = HubProcess(
        tmp_path / "hub", worker_urls=[worker.url], worker_secret=secret, heartbeat_timeout_s=30.0
    )
    try:
        hub.start()
        islands = [HubIsland(i, [hub.url], 2, SIZES, INT8, patience_s=120.0) for i in range(2)]
        together([lambda i=i: (i.join(), i.run(5)) for i in islands])
        worker.kill()
        worker.start()
        assert hub.ended() == 75
        assert "this worker was started anew" in hub.log.read_text() or "401" in hub.log.read_text()
        assert "Traceback" not in hub.log.read_text() + worker.log.read_text()
        hub.start()
        together([lambda i=i: (i.run(9), i.transport.leave("done")) for i in islands])
        assert islands[0].state.lineage == islands[1].state.lineage and islands[0].state.slot == 9
    finally:
        hub.kill()
        worker.kill()
