"""Islands of one rank that train a toy model in lock step, each in a thread, over TorchFT's Manager and a Lighthouse here."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft.coordination import LighthouseServer

from tests.helpers.tiny import free_port
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig
from torchtitan_diloco.data.ledger import Ledger
from torchtitan_diloco.exchange.bulk import serve_store
from torchtitan_diloco.exchange.managed import ManagedLockstep
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.island.replica import Replica
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.semi_sync import Setup
from torchtitan_diloco.semi_sync.sync import GradientSync

REPO = Path(__file__).parents[2]
STEPS, WIDTH, ROWS = 8, 4, 3
TIMEOUT_S = (
    20.0  # torch's store asks a name server at each connection, which may take its time to say nothing
)


@contextmanager
def lighthouse() -> Iterator[str]:
    """The address of a Lighthouse that notices within a second that an island is gone, and waits for a slow one."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=60_000,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=800,
    )
    try:
        yield "http://127.0.0.1:" + server.address().rpartition(":")[2].rstrip("/")
    finally:
        server.shutdown()


class LighthouseProcess:
    """One that can be killed, with its connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"
        options = ["--join-timeout-ms", "60000", "--quorum-tick-ms", "10", "--heartbeat-timeout-ms", "3000"]
        command = ["-m", "torchtitan_diloco", "lighthouse", "--bind", f"127.0.0.1:{port}", *options]
        self._process = subprocess.Popen([sys.executable, *command], cwd=REPO)

    def until_it_answers(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def lighthouse_process(port: int = 0) -> LighthouseProcess:
    server = LighthouseProcess(port or free_port())
    server.until_it_answers()
    return server


class Link(ManagedLockstep):
    """lost_votes: numbers of the votes, from 1, whose result does not reach this rank. deaf: of averages that fail here."""

    def __init__(self, *, lost_votes: set[int], deaf: set[int], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lost_votes, self.deaf = lost_votes, deaf
        self.votes = self.averages = 0

    def vote(self, ballot: torch.Tensor) -> torch.Tensor:
        result = super().vote(ballot)
        self.votes += 1
        if self.votes in self.lost_votes:
            raise RuntimeError("the result was lost")
        return result

    def average(self, tensor: torch.Tensor) -> None:
        self.averages += 1
        if self.averages in self.deaf:
            self.fail("this rank hears nothing")
        super().average(tensor)


def make_model(seed: int, width: int = WIDTH) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, 1))


def batch(island: int, number: int) -> torch.Tensor:
    """[ROWS, WIDTH], a function of the island and of how many it has had before."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * island + number))


class Feed:
    """One source of ``SHARDS`` shards, each with SAMPLES / SHARDS samples, read from the shard that has come least far."""

    SHARDS, SAMPLES = 8, 8000

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def holds(self) -> dict[str, str]:
        return {"source": f"0-{self.SHARDS - 1}"}

    def positions(self) -> dict[str, int]:
        return dict(self._at)

    def assign(self, positions: Mapping[str, int]) -> None:
        self._at = dict(positions)

    def describe(self) -> dict[str, Any]:
        about = {"path": "source", "samples": self.SAMPLES, "shards": self.SHARDS}
        return {"seed": 0, "sources": {"source": about}}

    def next(self) -> torch.Tensor:
        """[ROWS, WIDTH]: the next ROWS samples, a function of stream and position."""
        name = min(self._at, key=lambda n: (self._at[n], n))
        first = self._at[name]
        self._at[name] += ROWS
        seed = int(name.rpartition("/")[2]) * self.SAMPLES + first
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass
class Learner:
    """One island. at: called before the inner step of a number, on its thread; may raise ``Gone``."""

    number: int
    address: str
    folder: Path
    seed: int = 0
    width: int = WIDTH
    islands: int = 2
    steps: int = STEPS
    sync_every: int = 4
    incarnation: str = "first"
    run_id: str = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)
    backwards: int = 1
    started: float = 0.0
    lost_votes: set[int] = field(default_factory=set)
    deaf: set[int] = field(default_factory=set)
    feed: Feed | None = None
    at: Mapping[int, Callable[["Learner"], None]] = field(default_factory=dict)
    patience_s: float = 20.0

    def __post_init__(self) -> None:
        self.norms: dict[int, float] = {}
        self.raised: BaseException | None = None
        self.model = make_model(self.seed, self.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.trace = Trace(self.folder / f"island-{self.number}", self.number, self.incarnation)
        self.drain = DrainFlag()
        self.made: list[int] = []
        group = IslandGroup()
        self.method = GradientSync(
            Setup(
                config=SemiSyncConfig(method="sync", sync_every=self.sync_every, num_islands=self.islands),
                steps=self.steps,
                island=self.number,
                incarnation=f"{self.number}-{self.incarnation}",
                started=self.started,
                run_id=self.run_id,
                group=group,
                parameters=IslandParameters([self.model], group),
                trace=self.trace,
                drain=self.drain,
                make_transport=lambda *_: None,  # type: ignore[arg-type, return-value]
                settings=dict(self.settings),
                feed=self.feed,
                ledger=Ledger(self.folder / f"island-{self.number}", self.number) if self.feed else None,
                make_lockstep=self.open,
                replica=Replica([self.model], [self.optimizer], self.backwards),
            )
        )

    def open(self, group: IslandGroup) -> Link:
        held, store = serve_store("127.0.0.1", 0, timedelta(seconds=TIMEOUT_S))
        self.link = Link(
            held=held,
            rank=0,
            ranks=1,
            store=store,
            host="127.0.0.1",
            listen="127.0.0.1",
            island=IslandConfig(id=self.number),
            lighthouse=LighthouseConfig(
                address=self.address, heartbeat_interval_s=0.1, patience_s=self.patience_s
            ),
            timeout_s=TIMEOUT_S,
            lost_votes=self.lost_votes,
            deaf=self.deaf,
        )
        return self.link

    def train(self, step: int) -> None:
        """What the trainer does between zero_grad and the optimizer."""
        self.optimizer.zero_grad()
        for part in range(self.backwards):
            rows = batch(self.number, step) if self.feed is None else self.feed.next()
            (self.model(rows).square().mean() / self.backwards + 0.0 * part).backward()
            self.method.after_backward()
        self.norms[step] = float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        self.made.append(step)

    def run(self) -> None:
        step = self.method.account.step
        try:
            step = self.method.join(step)
            while step < self.steps and not self.drain.is_set():
                if step + 1 in self.at:
                    self.at[step + 1](self)
                step = self.method.after_inner_step(self.method.inner_step(step + 1, self.train), ROWS)
            self.method.leave("drain" if self.drain.is_set() else "done")
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.raised = error
            self.method.leave("failure")

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    @property
    def moments(self) -> torch.Tensor:
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        return torch.cat([s[k].reshape(-1) for s in states for k in ("exp_avg", "exp_avg_sq", "step")])


class Gone(Exception):
    """The island is lost."""


def lose(learner: Learner) -> None:
    raise Gone


def run_all(*learners: Learner, within_s: float = 40) -> None:
    """Run all to their end; a learner that has not come to one is drained, and fails the test."""
    threads = [threading.Thread(target=learner.run, daemon=True) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
    for learner, thread in zip(learners, threads, strict=True):
        if thread.is_alive():
            learner.drain.request("the test is over")
        assert not thread.is_alive(), f"island {learner.number} did not end"
