"""Islands that reach one another: the Lighthouse, this island's own address, and a pair with every island that is named."""

import socket
import threading
import time
from dataclasses import dataclass

from torchtitan_diloco.address import advertised
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.reach import host_and_port
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.listening import is_loopback
from torchtitan_diloco.preflight.dial import Place, connect, ephemeral, why, written
from torchtitan_diloco.preflight.pair import PURPOSES, Post, Strange, greet
from torchtitan_diloco.preflight.rows import Probe, Row, look

AGAIN_S = 0.25
PAGE, MARK = 4096, b"torchft"
"""Bytes of a Lighthouse's dashboard, and a word among them (TorchFT 0.2.0)."""
AFTER_S = 3.5
"""Before the end no preflight is waited for any more: what is dialled after it has to be over as well."""
OR_HUB = 'or let islands dial out only, with transport.kind = "hub"'


@dataclass(frozen=True, slots=True)
class Peer:
    """Another island, as the file names it. advertise "" or port 0: it does not say."""

    island: int
    advertise: str
    port: int


def peers_of(run: RunConfig, me: int) -> list[Peer]:
    """The other islands of ``run``, which is the configuration of the run as a whole."""
    ids = [t.id for t in run.islands] or range(run.semi_sync.num_islands)
    others = [for_island(run, i).island for i in ids if i != me] if run.islands else []
    return [Peer(other.id, other.advertise, other.port) for other in others]


def gloo_probes(config: RunConfig, run: RunConfig) -> list[Probe]:
    """config: of this island."""
    probes = [_lighthouse(config.lighthouse.address)]
    if run.semi_sync.num_islands > 1 or config.semi_sync.method == "sync":
        remedy = "see whether a name server answers this machine, or write addresses in place of names"
        place = config.island.advertise or "island.advertise"
        probes.append(Probe("own address", "here", place, remedy, lambda until: _islands(config, run, until)))
    return probes


def _islands(config: RunConfig, run: RunConfig, until: float) -> list[Row]:
    """All between islands. Raises UserError where this one has no address, or cannot listen there."""
    began = time.monotonic()
    peers = peers_of(run, config.island.id)
    host = advertised(config.island.advertise, config.lighthouse.address)
    post = Post(host, config.island.port, config.job.name, config.island.id)
    post.dials_until = until - AFTER_S
    try:
        named = [(peer, (peer.advertise, peer.port)) for peer in peers if peer.advertise and peer.port]
        probes = [_outward(peer, place, post, config) for peer, place in named]
        probes += [_inward(peer, host, post) for peer, _ in named]
        # A little earlier, so that what hangs is a row of its own.
        rows = [_own_address(host, run, peers), *look(probes, until - 0.2, began)]
    finally:
        post.close()
    nameless = run.semi_sync.num_islands - 1 - len(named)
    return [*rows, _unknown(config, host, nameless)] if nameless > 0 else rows


def _lighthouse(address: str) -> Probe:
    place = host_and_port(address)
    remedy = (
        "open outgoing TCP to it at this site's firewall, start it with `torchtitan-diloco lighthouse`, or correct "
        f"lighthouse.address; {OR_HUB}"
    )

    def tried(until: float) -> list[Row]:
        if place is None:
            said = f"lighthouse.address is {address}" if address else "lighthouse.address is empty"
            return [probe.row("fail", said, "write it as http://HOST:PORT")]
        try:
            with connect(place, until) as sock:
                sock.sendall(f"GET / HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n\r\n".encode())
                answer = b""
                while len(answer) < PAGE and MARK not in answer and (more := sock.recv(PAGE)):
                    answer += more
        except TimeoutError as error:
            return [probe.row("fail", why(error))]
        except OSError as error:
            return [probe.row("fail", why(error))]
        if MARK not in answer:
            return [probe.row("fail", "something else than a Lighthouse answers")]
        return [probe.row("ok", "it answers")]

    probe = Probe("Lighthouse", "out", written(place) if place else address, remedy, tried)
    return probe


def _own_address(host: str, run: RunConfig, peers: list[Peer]) -> Row:
    """What peers are told to dial."""
    remedy = (
        "set island.advertise to the address, or the interface, by which the other islands reach this machine"
    )
    if run.semi_sync.num_islands == 1 or not _is_loopback(host):
        return Row("own address", "here", host, "ok", "peers are told to dial it")
    elsewhere = any(peer.advertise and not _is_loopback(peer.advertise) for peer in peers)
    sites = {table.site for table in run.islands if table.site}
    if elsewhere or len(sites) > 1:
        return Row(
            "own address", "here", host, "fail", "peers on other machines would dial themselves", remedy
        )
    seen = "a loopback address: right only where all islands run on this machine"
    return Row("own address", "here", host, "warn", seen, remedy)


def _is_loopback(host: str) -> bool:
    """A name that does not resolve is none."""
    try:
        return all(is_loopback(str(entry[4][0]).split("%")[0]) for entry in socket.getaddrinfo(host, None))
    except OSError:
        return False


def _unknown(config: RunConfig, host: str, count: int) -> Row:
    """Islands whose addresses the file does not have: nothing is dialled, so nothing is claimed."""
    messages = f"port {config.island.port} (island.port)" if config.island.port else "any of the ports below"
    ranks = ", on every rank," if config.semi_sync.method == "sync" else ""
    return Row(
        f"{count} other island{'s' if count > 1 else ''}",
        "in",
        f"{host}:{config.island.port or ''}{',' if config.island.port else ''}{ephemeral()}",
        "warn",
        f"not tried: the file does not say where they are. They dial {messages} for messages, and{ranks} {ephemeral()} for "
        "store and gloo pairs; all of that has to be open inwards, from their addresses, and outwards to theirs",
        "give every [[islands]] table island.advertise and island.port, and run preflight on all of them at the same time",
    )


def _outward(peer: Peer, place: Place, post: Post, config: RunConfig) -> Probe:
    run, me = config.job.name, config.island.id
    who = f"island {peer.island}"
    messages = Probe(
        f"{who}: messages", "out", written(place),
        f"open TCP to {written(place)}, outwards here and inwards there, {OR_HUB}", lambda until: tried(until),
    )  # fmt: skip

    def tried(until: float) -> list[Row]:
        try:
            said = _insist(place, run, me, until)
        except ConnectionRefusedError as error:
            start = f"run preflight of {who} at the same time; or correct island.advertise and island.port in its table"
            return [messages.row("warn", why(error), start)]
        except socket.gaierror as error:
            names = "an interface of that machine, or a name that does not resolve here"
            outcome = "fail" if "." in peer.advertise else "warn"
            return [messages.row(outcome, names if outcome == "warn" else why(error), "give an address")]  # type: ignore[arg-type]
        except OSError as error:
            return [messages.row("fail", why(error))]
        except Strange as error:
            return [
                messages.row("warn", str(error), f"run preflight of {who} before it trains, at the same time")
            ]
        post.goes_on(peer.island, said.get("dials_for_s"))
        rows = [messages.row("ok", "its preflight answers")]
        return rows + _bulk(who, place[0], said, run, me, until)

    return messages


def _bulk(who: str, host: str, said: dict[str, object], run: str, me: int, until: float) -> list[Row]:
    """The ports that its machine has chosen, as it will for the run: side by side, since each may take its time."""
    ports, rows = said.get("ports"), {}
    if not isinstance(ports, dict):
        return []

    def dial(purpose: str, port: int) -> None:
        place = (host, port)
        remedy = f"open TCP to ports {said.get('range')} of {host}, outwards here and inwards there, {OR_HUB}"
        try:
            greet(place, run, me, until)
            rows[purpose] = Row(f"{who}: {purpose}", "out", written(place), "ok", "its preflight answers")
        except (OSError, Strange) as error:
            rows[purpose] = Row(f"{who}: {purpose}", "out", written(place), "fail", why(error), remedy)

    threads = [
        threading.Thread(target=dial, args=(purpose, int(ports[purpose])), daemon=True)
        for purpose in PURPOSES[1:]
        if purpose in ports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[purpose] for purpose in PURPOSES[1:] if purpose in rows]


def _insist(place: Place, run: str, me: int, until: float) -> dict[str, object]:
    """Greet a preflight that may be started a little later than this one. Raises what the last try has."""
    last = until - AFTER_S
    while True:
        try:
            return greet(place, run, me, until)
        except (OSError, Strange):
            if time.monotonic() + AGAIN_S >= last:
                raise
        time.sleep(AGAIN_S)


def _inward(peer: Peer, host: str, post: Post) -> Probe:
    who = f"island {peer.island}"
    ports = ", ".join(f"{port} ({purpose})" for purpose, port in post.ports.items())
    remedy = f"open TCP from {peer.advertise} to {host}, ports {post.ports['messages']} and {ephemeral()}, {OR_HUB}"

    def tried(until: float) -> list[Row]:
        with post.news:
            post.news.wait_for(
                lambda: not post.missing(peer.island), max(0.0, until - time.monotonic() - 0.3)
            )
        missing = post.missing(peer.island)
        if not missing:
            return [probe.row("ok", "it has come by all of them")]
        if len(missing) < len(PURPOSES):
            return [probe.row("fail", f"it has come, but not by {' and '.join(missing)}")]
        if post.expects(peer.island):
            return [probe.row("fail", "its preflight runs, and nothing of it has come here")]
        seen = "nothing has come from it; where its preflight was running, this direction is blocked"
        return [probe.row("warn", seen)]

    probe = Probe(who, "in", f"{host}: {ports}", remedy, tried)
    return probe
