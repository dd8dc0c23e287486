"""Peak memory of one island at the moments that could need more of it than training does.

Run as: python -m tests.helpers.memory_probe MEGABYTES OUT. It trains a model of that size by hand over the gloo transport,
with a peer in another process, and writes the peak of each moment, in bytes above the resident size after the first inner
step (parameters, gradients and Adam's moments are there, nothing of the outer loop is), as JSON.
"""

import json
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from torch import nn
from torchft.coordination import LighthouseServer

from tests.helpers.methods import method_of
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig, TransportConfig
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.semi_sync.diloco import DiLoCo

LAYERS = 8
STEPS = 100_000


class Peaks:
    """The highest resident size of this process, sampled every 2 ms."""

    def __init__(self) -> None:
        self.base = psutil.Process().memory_info().rss
        self.found: dict[str, int] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        process, stop = psutil.Process(), threading.Event()
        peak = process.memory_info().rss

        def sample() -> None:
            nonlocal peak
            while not stop.wait(0.002):
                peak = max(peak, process.memory_info().rss)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.found[name] = max(peak, process.memory_info().rss) - self.base


def make(
    number: int, megabytes: int, address: str, folder: Path, settings: dict
) -> tuple[nn.Module, DiLoCo, Callable[[], None]]:
    torch.manual_seed(number)
    width = round((megabytes * 2**20 / 4 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()

    method = method_of(
        model,
        SemiSyncConfig(sync_every=LAYERS, **settings),
        folder,
        lambda merge: GlooTransport(
            IslandConfig(id=number),
            LighthouseConfig(address=address, quorum_interval_s=0.05),
            TransportConfig(exchange_timeout_s=60.0),
            merge,
        ),
        island=number,
        steps=STEPS,
        incarnation=f"start-{number}",
    )
    return model, method, step


def peer(
    megabytes: int, address: str, folder: str, settings: dict, news: "multiprocessing.Queue[dict]"
) -> None:
    """The other island: joins, which is a heal, trains two windows, leaves, and reports its own peaks."""
    torch.set_num_threads(1)
    _, method, step = make(1, megabytes, address, Path(folder), settings)
    step()  # gradients and moments are there
    peaks = Peaks()
    with peaks.of("receiving a heal"):
        at = method.join(0)
    news.put({})
    for _ in range(2 * LAYERS):
        step()
        at = method.after_inner_step(at + 1, 10)
    method.leave("done")
    news.put(peaks.found)


def measure(megabytes: int, settings: dict) -> dict[str, int]:
    torch.set_num_threads(1)
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=300, quorum_tick_ms=20)
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    with TemporaryDirectory() as folder:
        _, method, step = make(0, megabytes, address, Path(folder), settings)
        step()
        peaks = Peaks()
        with peaks.of("inner step"):
            step()
        with peaks.of("founding"):
            at = method.join(0)

        def train(enough: Callable[[int], bool]) -> None:
            nonlocal at
            count = 0
            while not enough(count):
                step()
                at = method.after_inner_step(at + 1, 10)
                count += 1

        train(lambda count: count >= LAYERS)  # momentum is there
        with peaks.of("window alone"):
            train(lambda count: count >= LAYERS)
        other = context.Process(target=peer, args=(megabytes, address, folder, settings, news))
        other.start()
        with peaks.of("serving a heal"):
            train(lambda count: not news.empty())
        news.get()
        with peaks.of("window with a peer"):
            train(lambda count: not news.empty())
        received = news.get()
        method.leave("done")
        other.join(30)
    server.shutdown()
    return {**peaks.found, **received}


def main() -> None:
    megabytes, out = int(sys.argv[1]), Path(sys.argv[2])
    result = {
        "whole": measure(megabytes, {}),
        "streaming": measure(megabytes, {"fragments": 4, "overlap": 3}),
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
