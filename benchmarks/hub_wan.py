"""The hub over a long link: do heartbeats get through beside the bulk, and do several connections add up?

    python benchmarks/hub_wan.py              # as root, about 2 minutes; needs no hardware but two cores

Hub (TLS, a token) and island are processes in network namespaces 25 ms apart each way. First at 20 Mbit/s: an island's
heartbeats, while its bulk goes up and comes down over 8 connections. Then without a limit, where each connection is held to
some 14 MiB/s by windows of 700 KiB, as between public supercomputers: 8 connections against one.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emulated_wan import Wan, address
from paired import machine

REPO = Path(__file__).parents[1]
WINDOW = 700 << 10  # bytes; over a round trip of 50 ms these are 14 MB/s
MIB = 1 << 20

TOKEN = "a-token-of-island-0"

HUB = """
import sys
sys.path.insert(0, sys.argv[1])
from torchtitan_diloco.hub.access import Access
from torchtitan_diloco.hub.rules import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.tokens import digest
cert, key, token = (sys.argv[3] + name for name in ("/cert.pem", "/key.pem", "/token"))
access = Access({"island-0": digest(open(token).read())})
server = HubServer(sys.argv[2], 29520, "run", Rules(), access=access, cert=cert, key=key)
print("ready", flush=True)
server.run()
"""

ISLAND = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from tests.helpers.hub_islands import HubIsland
from torchtitan_diloco.config.own import TransportConfig
url, files, size, slots = f"https://{sys.argv[2]}:29520", sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
transport = TransportConfig(
    kind="hub", urls=[url], streams=8, ca_file=files + "/cert.pem", token_file=files + "/token"
)
island = HubIsland(0, [url], islands=1, sizes=(size,), transport_config=transport)
beats, say = [], island.transport._sign_of_life
def timed():
    began = time.monotonic()
    try:
        return say()
    finally:
        beats.append(time.monotonic() - began)
island.transport._sign_of_life = timed
island.join()
began = time.monotonic()
beats.clear()
island.run(slots)
seconds = time.monotonic() - began
island.transport.leave("done")
print(json.dumps({"beats": beats, "seconds": seconds}))
"""

COPY = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from tests.helpers.hub_islands import HubIsland
from torchtitan_diloco.config.own import TransportConfig
url, files, size = f"https://{sys.argv[2]}:29520", sys.argv[3], int(sys.argv[4])
transport = TransportConfig(
    kind="hub", urls=[url], streams=int(sys.argv[5]), ca_file=files + "/cert.pem", token_file=files + "/token"
)
island = HubIsland(0, [url], islands=1, sizes=(size,), transport_config=transport)
island.join()
moving = []
def timed(move):
    def call(*arguments, **more):
        began = time.monotonic()
        move(*arguments, **more)
        moving.append(time.monotonic() - began)
    return call
island.transport._put, island.transport._get = timed(island.transport._put), timed(island.transport._get)
for slot in range(2):
    moving.clear()  # of the second slot, when the connections are there
    island.offer(slot)
    outcome = island.settle(slot, 120)
island.transport.leave("done")
print(json.dumps({"seconds": sum(moving), "bytes": outcome.bytes_sent + outcome.bytes_received}))
"""


def child(wan: Wan, site: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code, str(REPO), *arguments]
    return subprocess.Popen(wan.command(site, words), stdout=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen[str]) -> dict[str, float | list[float]]:
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"a process ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def credentials(folder: Path, address: str) -> None:
    """A certificate for the hub, which is its own authority, and a token for the island."""
    name = ["-subj", "/CN=hub", "-addext", f"subjectAltName=IP:{address}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, *files]
    subprocess.run(request, check=True, capture_output=True)
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)


def with_hub(wan: Wan, code: str, *arguments: str) -> dict[str, float | list[float]]:
    """arguments: of the island, the first is the folder with the credentials."""
    hub = child(wan, 0, HUB, wan.address(0), arguments[0])
    try:
        assert hub.stdout is not None
        hub.stdout.readline()
        return answer(child(wan, 1, code, wan.address(0), *arguments))
    finally:
        hub.kill()
        hub.wait()


def narrow(wan: Wan) -> None:
    """Hold each TCP connection in both sites to ``WINDOW``."""
    # A receiver offers half of its buffer as the window.
    for setting, size in (("tcp_rmem", 2 * WINDOW), ("tcp_wmem", 2 * WINDOW)):
        for site in (0, 1):
            value = f"4096 {size} {size}"
            subprocess.run(wan.command(site, ["sysctl", "-qw", f"net.ipv4.{setting}={value}"]), check=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    print(f"command: {shlex.join(['python', 'benchmarks/hub_wan.py', *argv])}")
    print(f"machine: {machine()}")
    with tempfile.TemporaryDirectory() as files:
        credentials(Path(files), address(0))
        measure(files, arguments.repeats)
    return 0


def measure(files: str, repeats: int) -> None:
    with Wan(sites=2, rate=20e6, delay_s=0.025) as wan:
        found = with_hub(wan, ISLAND, files, "2500000", "3")  # 10 MB up and 10 MB down in each of 3 slots
        beats = found["beats"]
        assert isinstance(beats, list)
        print(
            f"heartbeats at 20 Mbit/s beside 60 MB of bulk in {found['seconds']:.1f} s: {len(beats)}, median "
            f"{statistics.median(beats):.3f} s, longest {max(beats):.3f} s (target below 1 s)"
        )
    with Wan(sites=2, rate=0, delay_s=0.025) as wan:
        narrow(wan)
        rates: dict[int, list[float]] = {1: [], 8: []}
        for _ in range(repeats):
            for streams in rates:
                found = with_hub(wan, COPY, files, "16000000", str(streams))  # 64 MB up, 64 MB down
                rates[streams].append(found["bytes"] / found["seconds"] / MIB)  # type: ignore[operator]
        one, eight = (statistics.median(rates[n]) for n in (1, 8))
        print(
            f"one connection {one:.1f} MiB/s, 8 connections {eight:.1f} MiB/s: {eight / one:.1f} times (target 6)"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
