"""FR-47: only the rendezvous port is open, gloo's ports are not. Every direction is dialled, and the blocked one is named."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers.blocked import closed, dropping, silent
from tests.helpers.real_run import offline
from tests.helpers.wan import emulated_wan, needs_root
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.preflight import network
from torchtitan_diloco.preflight.pair import Post

LIMIT_S = 10.0
HOSTS = ("127.0.0.1", "127.0.0.2")


class Preflight:
    """The command, started; ``rows`` are of its table, outcome by "what way"."""

    def __init__(self, file: Path, *arguments: str, within: tuple[str, ...] = ()) -> None:
        self.began = time.monotonic()
        environment = {k: v for k, v in offline().items() if not k.lower().endswith("_proxy")}
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "torchtitan_diloco", "preflight", str(file), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> "Preflight":
        self.output, _ = self._process.communicate(timeout=30)
        self.seconds = time.monotonic() - self.began
        self.code = self._process.returncode
        found = re.findall(r"^ (ok|warn|fail) +(\S.*?)  +(out ->|<- in|here) ", self.output, re.MULTILINE)
        self.rows = {f"{name} {way}": outcome for outcome, name, way in found}
        return self

    def said(self, row: str) -> str:
        """The line below the table about a row."""
        name, way = re.fullmatch(r"(.*) (out ->|<- in|here)", row).groups()  # type: ignore[union-attr]
        (line,) = [
            part
            for part in self.output.splitlines()
            if re.match(rf"(fail|warn): {re.escape(name)} \({way} ", part)
        ]
        return line


@contextlib.contextmanager
def lighthouse(folder: Path, bind: str = "127.0.0.1:0", within: tuple[str, ...] = ()) -> Iterator[int]:
    port_file = folder / "lighthouse-port"
    command = [*within, sys.executable, "-m", "torchtitan_diloco", "lighthouse", "--bind", bind]
    server = subprocess.Popen([*command, "--port-file", str(port_file)], env=offline())
    try:
        end = time.monotonic() + 60
        while not port_file.exists():
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        yield int(port_file.read_text())
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def lighthouse_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with lighthouse(tmp_path_factory.mktemp("lighthouse")) as port:
        yield port


def write(folder: Path, address: str, ports: tuple[int, int], hosts: tuple[str, str] = HOSTS) -> Path:
    tables = "".join(
        f'[[islands]]\nid = {i}\nisland.advertise = "{host}"\nisland.port = {port}\n'
        for i, (host, port) in enumerate(zip(hosts, ports, strict=True))
    )
    file = folder / "run.toml"
    file.write_text(
        '[job]\nname = "trial"\n[model]\nname = "llama3"\nflavor = "debugmodel"\n'
        f'[lighthouse]\naddress = "{address}"\n{tables}'
    )
    return file


@pytest.fixture
def ports() -> tuple[int, int]:
    return closed(HOSTS[0]), closed(HOSTS[1])


ALL = {
    "Lighthouse out ->",
    "own address here",
    *(f"island 1: {purpose} out ->" for purpose in ("messages", "store", "gloo pair")),
    "island 1 <- in",
}


def test_fr47_two_islands_that_reach_one_another_dial_everything_both_ways(
    tmp_path: Path, lighthouse_port: int, ports: tuple[int, int]
) -> None:
    file = write(tmp_path, f"http://127.0.0.1:{lighthouse_port}", ports)
    both = [Preflight(file, "--island", str(island)) for island in (0, 1)]
    first, second = (one.end() for one in both)
    assert first.rows.keys() == ALL, first.output
    for one in (first, second):
        # All of it on one machine: that peers are told a loopback address is said.
        assert [row for row, outcome in one.rows.items() if outcome != "ok"] == ["own address here"], (
            one.output
        )
        assert one.code == 0 and one.seconds < LIMIT_S and "nothing failed" in one.output


@pytest.mark.parametrize("how", ["dropped", "silent", "closed"])
def test_fr47_a_blocked_way_to_the_lighthouse_is_named_within_ten_seconds(tmp_path: Path, how: str) -> None:
    with dropping() as dropped, silent() as mute:
        port = {"dropped": dropped, "silent": mute, "closed": closed()}[how]
        file = write(tmp_path, f"http://127.0.0.1:{port}", (0, 0))
        one = Preflight(file, "--island", "0").end()
    assert one.code == 2 and one.seconds < LIMIT_S
    assert one.rows["Lighthouse out ->"] == "fail", one.output
    said = one.said("Lighthouse out ->")
    assert f"127.0.0.1:{port}" in said and "open outgoing TCP to it at this site's firewall" in said
    seen = {"dropped": "drops it", "silent": "no answer", "closed": "refused"}[how]
    assert seen in said and "Traceback" not in one.output


def test_a_web_server_that_is_no_lighthouse_is_told_from_one(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one = Preflight(
            write(tmp_path, f"http://127.0.0.1:{server.server_port}", (0, 0)), "--island", "0"
        ).end()
        server.shutdown()
    assert one.code == 2 and one.rows["Lighthouse out ->"] == "fail", one.output
    assert "something else than a Lighthouse answers" in one.said("Lighthouse out ->")


@pytest.mark.parametrize("purpose", ["messages", "store", "gloo pair"])
def test_fr47_of_the_ways_to_a_peer_the_blocked_one_is_named(
    tmp_path: Path, lighthouse_port: int, purpose: str
) -> None:
    """Island 1 is a post of this test; what is sent to one of its ports is dropped."""
    post = Post(HOSTS[1], 0, "trial", 1)
    try:
        with dropping(HOSTS[1]) as dropped:
            messages = dropped if purpose == "messages" else post.ports["messages"]
            post.ports[purpose] = dropped
            file = write(tmp_path, f"http://127.0.0.1:{lighthouse_port}", (0, messages))
            one = Preflight(file, "--island", "0").end()
    finally:
        post.close()
    assert one.code == 2 and one.seconds < LIMIT_S
    assert [row for row, outcome in one.rows.items() if outcome == "fail"] == [
        f"island 1: {purpose} out ->"
    ], one.output
    said = one.said(f"island 1: {purpose} out ->")
    assert f"{HOSTS[1]}:{dropped}" in said and "drops it" in said and 'transport.kind = "hub"' in said


@pytest.mark.parametrize("comes", [(), ("messages",)])
def test_fr47_what_does_not_come_in_is_named_though_everything_goes_out(
    tmp_path: Path, lighthouse_port: int, comes: tuple[str, ...]
) -> None:
    """Island 1 says that it dials; of that only some arrives here."""
    from torchtitan_diloco.preflight.pair import greet

    post = Post(HOSTS[1], 0, "trial", 1)
    post.dials_until = time.monotonic() + 60
    own = closed(HOSTS[0])
    try:
        file = write(tmp_path, f"http://127.0.0.1:{lighthouse_port}", (own, post.ports["messages"]))
        one = Preflight(file, "--island", "0")
        end = time.monotonic() + 8
        while comes and time.monotonic() < end:
            with contextlib.suppress(OSError):
                greet((HOSTS[0], own), "trial", 1, end)
                break
            time.sleep(0.05)
        one.end()
    finally:
        post.close()
    assert one.code == 2 and one.seconds < LIMIT_S
    assert [row for row, outcome in one.rows.items() if outcome == "fail"] == ["island 1 <- in"], one.output
    said = one.said("island 1 <- in")
    assert (
        "but not by store and gloo pair" if comes else "its preflight runs, and nothing of it has come here"
    ) in said
    assert re.search(rf"open TCP from {HOSTS[1]} to {HOSTS[0]}, ports {own} and \d+-\d+", said)


def test_fr47_where_the_file_does_not_say_who_the_others_are_the_ports_are_said_instead(
    tmp_path: Path, lighthouse_port: int
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[semi_sync]\nnum_islands = 3\n[island]\nport = 29777\n'
        f'[lighthouse]\naddress = "http://127.0.0.1:{lighthouse_port}"\n'
    )
    one = Preflight(file, "--island", "2").end()
    assert one.code == 0 and one.seconds < LIMIT_S
    assert one.rows["2 other islands <- in"] == "warn"
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    said = one.said("2 other islands <- in")
    assert "port 29777 (island.port)" in said and f"{low}-{high}" in said and "not tried" in said


def test_fr47_an_address_that_peers_on_another_machine_would_dial_in_vain_fails(
    tmp_path: Path, lighthouse_port: int
) -> None:
    hosts = ("127.0.0.1", "192.0.2.7")
    one = Preflight(
        write(tmp_path, f"http://127.0.0.1:{lighthouse_port}", (0, 0), hosts), "--island", "0"
    ).end()
    assert one.code == 2 and one.rows["own address here"] == "fail"
    assert "set island.advertise" in one.said("own address here")


def test_a_port_that_is_taken_and_a_peer_that_is_not_there_yet_are_told_apart(
    tmp_path: Path, lighthouse_port: int, ports: tuple[int, int]
) -> None:
    file = write(tmp_path, f"http://127.0.0.1:{lighthouse_port}", ports)
    with silent() as taken:
        holder = Preflight(file, "--island", "0", "--island.port", str(taken))
        alone = Preflight(file, "--island", "0")
        assert (holder.end().code, alone.end().code) == (2, 0)
    assert f"cannot listen on 127.0.0.1:{taken}" in holder.said("own address here")
    assert alone.rows["island 1: messages out ->"] == alone.rows["island 1 <- in"] == "warn"
    assert "run preflight of island 1 at the same time" in alone.said("island 1: messages out ->")


@needs_root
def test_fr47_between_two_machines_whose_link_drops_everything(tmp_path: Path) -> None:
    with emulated_wan().Wan(sites=2, delay_s=0.05) as wan:
        hosts = (wan.address(0), wan.address(1))
        inside = [tuple(wan.command(site, [])) for site in (0, 1)]
        with lighthouse(tmp_path, f"{hosts[0]}:0", inside[0]) as port:
            file = write(tmp_path, f"http://{hosts[0]}:{port}", (29601, 29601), hosts)
            both = [Preflight(file, "--island", str(i), within=inside[i]) for i in (0, 1)]
            for one in both:
                assert one.end().code == 0 and set(one.rows.values()) == {"ok"}, one.output
            wan.set(0, 0.05, up=False)
            cut = Preflight(file, "--island", "1", within=inside[1]).end()
    assert cut.code == 2 and cut.seconds < LIMIT_S
    assert cut.rows["Lighthouse out ->"] == cut.rows["island 0: messages out ->"] == "fail", cut.output


def test_a_name_server_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(30))
    monkeypatch.setattr(network, "LIMIT_S", 1.0)
    config = RunConfig()
    config.lighthouse.address, config.semi_sync.num_islands = "http://lighthouse.test:29510", 2
    began = time.monotonic()
    rows = network.network_rows(config, config)
    assert time.monotonic() - began < 3
    assert [(row.name, row.outcome) for row in rows] == [("Lighthouse", "fail"), ("own address", "fail")]
    assert "name server" in rows[1].remedy


def test_wrong_usage_is_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path, "http://127.0.0.1:9", (0, 0))
    for arguments, sentence in (
        ((), "error: --island: say which of the [[islands]] this is (0, 1)"),
        (("--island", "2"), "error: --island 2: there is no such island; there are 0, 1"),
        (("--island.id", "1"), "error: island.id: `preflight` takes --island N instead"),
        (("--island", "0", "--wait", "-1"), "error: --wait -1: give seconds from 0 to a day"),
    ):
        one = Preflight(file, *arguments).end()
        assert (one.code, one.output.strip()) == (2, sentence)
