"""What the hub adds to moving bytes: two islands put a fragment each, it merges, both get the result.

    python benchmarks/hub.py                      # about 2 minutes, 3 GB
    python benchmarks/hub.py --workers 2          # the same with its parts spread over two worker processes

50 million float32 values in 4 fragments. The hub is a process of its own with one torch thread, as `torchtitan-diloco syncer`
starts it, durable state included. Plain: the same bytes up and down over as many connections, through the same Starlette,
uvicorn and httpx, with nothing in between but the checksums. Turns are taken A B B A; the ratio is plain over ours, so 1.0
is as fast as copying. The peak of the hub's memory over its idle process stands beside, and the CPU time of each process.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from paired import interval, machine, order_of_turns, require_counts

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from tests.helpers.hub_islands import RUN, HubIsland, together  # noqa: E402
from torchtitan_diloco.config.own import TransportConfig  # noqa: E402
from torchtitan_diloco.exchange.hub_link import HubLink  # noqa: E402
from torchtitan_diloco.exchange.pace import TokenBucket  # noqa: E402
from torchtitan_diloco.hub.slot import Record  # noqa: E402
from torchtitan_diloco.hub.upload import Upload  # noqa: E402
from torchtitan_diloco.outer.digest import link as link_of  # noqa: E402
from torchtitan_diloco.outer.policy import Header, Member  # noqa: E402

VALUES, FRAGMENTS, ISLANDS, STREAMS = 50_000_000, 4, 2, 8
TARGET = 0.6
MB = 1e6

PLAIN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import uvicorn, xxhash
from starlette.applications import Starlette
from starlette.responses import Response, JSONResponse
from starlette.routing import Route
held = torch.zeros(int(sys.argv[2]), dtype=torch.uint8)
async def put(request):
    chunk = await request.body()
    offset = int(request.query_params["offset"])
    assert xxhash.xxh3_64_hexdigest(chunk) == request.headers["x-diloco-xxh3"]
    held.numpy().data[offset:offset + len(chunk)] = chunk
    return JSONResponse({}, headers={"x-diloco-epoch": "0"})
async def get(request):
    offset, size = int(request.query_params["offset"]), int(request.query_params["size"])
    chunk = held.numpy().data[offset:offset + size].tobytes()
    return Response(chunk, headers={"x-diloco-epoch": "0", "x-diloco-xxh3": xxhash.xxh3_64_hexdigest(chunk)})
app = Starlette(routes=[Route("/plain", put, methods=["PUT"]), Route("/plain", get)])
config = uvicorn.Config(app, port=0, log_level="warning", access_log=False)
server = uvicorn.Server(config)
sock = config.bind_socket()
print(sock.getsockname()[1], flush=True)
server.run(sockets=[sock])
"""

HUB = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.worker_process import Crewed
server = HubServer(
    "127.0.0.1", 0, sys.argv[2], Rules(lease_s=60), Path(sys.argv[3]), crewed=Crewed(int(sys.argv[4]))
)
print(server.port, flush=True)
server.run()
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args(argv)
    require_counts(parser, arguments, "pairs")
    return arguments


def started(code: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server and its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(REPO), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


class Ours:
    """One slot after another; an island does what it takes to have the encoded result, and no more."""

    def __init__(self, url: str) -> None:
        sizes = tuple([VALUES // FRAGMENTS] * FRAGMENTS)
        transport = TransportConfig(kind="hub", urls=[url], streams=STREAMS)
        self.islands = [
            HubIsland(i, [url], islands=ISLANDS, sizes=sizes, transport_config=transport, steps=100_000)
            for i in range(ISLANDS)
        ]
        together([island.join for island in self.islands], 300)
        self.payload = torch.randn(sizes[0]).view(torch.uint8)
        self.held = [
            [(s.version, s.digest, s.lineage, s.tokens) for s in island.state.states]
            for island in self.islands
        ]
        self.slot = 0

    def slot_of(self, island: int) -> None:
        link, slot = self.islands[island].transport._link, self.slot
        assert link is not None
        fragment = slot % FRAGMENTS
        version, digest, lineage, tokens = self.held[island][fragment]
        header = Header(
            island, slot, fragment, version, digest, lineage, tokens, 4, 40, True, {f"a/{island}": slot + 1}, {},
            {"a": "0-9"}, False,
        )  # fmt: skip
        reply = link.ask("POST", f"/slots/{slot}/header", header.to_json())
        nothing = lambda size: None
        place = reply.get("at") or f"/slots/{slot}/payload"
        link.put(place, self.payload, reply["missing"], nothing, of=self.payload.numel())
        while reply["status"] == "open":
            reply = link.ask("GET", f"/slots/{slot}/outcome", wait_s=20, wait=20)
        assert reply["status"] == "committed", reply
        link.get(reply.pop("at", "") or f"/slots/{slot}/result", Upload(self.payload.numel()), nothing)
        record = Record.from_json(reply)
        digest = record.digest.split()[0]
        lineage = link_of(lineage, slot, fragment, digest, list(record.participants), record.members)
        self.held[island][fragment] = (version + 1, digest, lineage, tokens + record.tokens)
        self.islands[island].transport._published.slot = slot + 1

    def turn(self) -> None:
        together([lambda i=i: self.slot_of(i) for i in range(ISLANDS)], 300)  # type: ignore[misc]
        self.slot += 1


class Plain:
    def __init__(self, url: str, nbytes: int) -> None:
        config = TransportConfig(kind="hub", urls=[url])
        self.links = [HubLink(config, RUN, Member(i, "a"), STREAMS, TokenBucket(0)) for i in range(ISLANDS)]
        self.data = torch.zeros(nbytes, dtype=torch.uint8)

    def turn(self) -> None:
        nothing = lambda size: None

        def copy(i: int) -> None:
            self.links[i].put("/plain", self.data, [(0, self.data.numel())], nothing)
            self.links[i].get("/plain", Upload(self.data.numel()), nothing)

        together([lambda i=i: copy(i) for i in range(ISLANDS)], 300)  # type: ignore[misc]


def timed(turn: Callable[[], None]) -> float:
    began = time.perf_counter()
    turn()
    return time.perf_counter() - began


class Peak(threading.Thread):
    """The largest resident memory of a process, watched 200 times a second, and its CPU time since ``count``."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self.idle = self.peak = self._process.memory_info().rss
        self.ended = threading.Event()
        self._counted = 0.0

    def count(self) -> None:
        self._counted = sum(self._process.cpu_times()[:2])

    @property
    def cpu_s(self) -> float:
        return sum(self._process.cpu_times()[:2]) - self._counted

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    torch.set_num_threads(1)
    print(f"command: {shlex.join(['python', 'benchmarks/hub.py', *argv])}")
    print(f"machine: {machine()}")
    nbytes = 4 * (VALUES // FRAGMENTS)
    with tempfile.TemporaryDirectory() as folder:
        hub, hub_url = started(HUB, RUN, folder, str(arguments.workers))
        plain_server, plain_url = started(PLAIN, str(nbytes))
        try:
            peaks = [Peak(pid) for pid in (hub.pid, *(p.pid for p in psutil.Process(hub.pid).children()))]
            for peak in peaks:
                peak.start()
            ours, plain = Ours(hub_url), Plain(plain_url, nbytes)
            for _ in range(FRAGMENTS):
                ours.turn()  # momentum is there
            plain.turn()
            sides = [plain.turn, ours.turn]
            ratios, seconds = [], ([], [])  # type: ignore[var-annotated]
            for peak in peaks:
                peak.count()
            for first, second in order_of_turns(arguments.pairs):
                took = {side: timed(sides[side]) for side in (first, second)}
                ratios.append(took[0] / took[1])
                seconds[0].append(took[0])
                seconds[1].append(took[1])
            for peak in peaks:
                peak.ended.set()
            low, high = interval(ratios)
            moved = 2 * ISLANDS * nbytes / MB
            print(
                f"throughput of put + merge + get over a plain copy: {statistics.median(ratios):.2f} "
                f"(95 % {low:.2f} to {high:.2f}; target {TARGET})"
            )
            for name, took in zip(("plain", "ours"), seconds, strict=True):
                middle = statistics.median(took)
                print(f"  {name}: {middle:.3f} s for {moved:.0f} MB, {moved / middle:.0f} MB/s")
            for k, peak in enumerate(peaks):
                used, own = peak.peak - peak.idle, arguments.pairs * moved
                text = f"{'hub' if k == 0 else f'worker {k - 1}'}: {used / MB:.0f} MB over its idle process"
                if (k > 0) == (arguments.workers > 0):
                    own /= max(1, arguments.workers)
                    bound = 2 * 4 * VALUES / max(1, arguments.workers) + (ISLANDS + 2) * nbytes
                    text += f"; anchor + momentum + (islands + 2) fragments = {bound / MB:.0f} MB: "
                    text += "met" if used <= bound else "MISSED"
                    print(f"{text}; CPU {1e3 * peak.cpu_s / own:.2f} ms per MB that it moves")
                else:
                    print(f"{text}; CPU {1e3 * peak.cpu_s / arguments.pairs:.0f} ms per pair of turns")
        finally:
            for process in (hub, plain_server):
                process.kill()
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
