"""An island reduced to its gateway, in a process that can be killed, frozen or cut off: the production method over gloo.

Its model grows by a constant in each inner step. What it does is in ``island-<id>/events.jsonl``, as with a trainer.
Run as: python -m tests.helpers.gateway_process JSON (see ``Order``).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
SAVED = "saved.json"


@dataclass(kw_only=True)
class Order:
    """What one process is to be. rate: in Mbit/s. settings: of [lighthouse]."""

    folder: str
    island: int
    islands: int
    settings: dict[str, Any]
    size: int = 1000
    steps: int = 1_000_000
    sync_every: int = 2
    overlap: int = 0
    pace_s: float = 0.05
    rate: float = 0.0
    advertise: str = ""
    exchange_timeout_s: float = 30.0
    semi_sync: dict[str, Any] = field(default_factory=dict)


class GatewayProcess:
    """The handle that a test has of it. prefix: words before the command, for instance to enter a network namespace."""

    def __init__(self, order: Order, prefix: Sequence[str] = ()) -> None:
        self.order, self.prefix = order, list(prefix)
        self.folder = Path(order.folder) / f"island-{order.island}"
        self.log = Path(order.folder) / f"gateway-{order.island}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "tests.helpers.gateway_process",
            json.dumps(asdict(self.order)),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        environment |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Also when it is frozen. Idempotent."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ended(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if not kind or event["event"] == kind]

    def rounds(self) -> list[dict[str, Any]]:
        """Committed slots."""
        return [event for event in self.events("round") if event["committed"]]

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    def moving(self) -> tuple[int, int, int] | None:
        """Slot, bytes sent and received so far of the exchange that it is in the middle of."""
        path = self.folder / "traffic.json"
        try:
            slot, sent, received = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return slot, sent, received


@contextlib.contextmanager
def gateways(processes: Sequence[GatewayProcess]) -> Iterator[Sequence[GatewayProcess]]:
    """Started, and ended with the block whatever state they are in. What they said is shown where the block fails."""
    try:
        for process in processes:
            process.start()
        yield processes
    except BaseException:
        for process in processes:
            if process.log.exists():
                sys.stderr.write(f"---- {process.log.name}\n{process.log.read_text()[-3000:]}\n")
        raise
    finally:
        for process in processes:
            process.kill()


def until(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    """Its first value that is true; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value


# ---- inside the process ----------------------------------------------------------------------------------------------


def main() -> None:
    import logging
    import uuid

    import torch
    from torch import nn

    from tests.helpers.methods import method_of
    from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig, TransportConfig
    from torchtitan_diloco.errors import Resumable
    from torchtitan_diloco.exchange.gloo import GlooTransport
    from torchtitan_diloco.process import die_with_parent

    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    order = Order(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(order.size)))
    config = SemiSyncConfig(
        sync_every=order.sync_every, overlap=order.overlap, num_islands=order.islands, **order.semi_sync
    )
    lighthouse = LighthouseConfig(**order.settings)
    transport = TransportConfig(exchange_timeout_s=order.exchange_timeout_s, max_rate=order.rate)
    method = method_of(
        model,
        config,
        Path(order.folder),
        lambda merge: GlooTransport(
            IslandConfig(id=order.island, advertise=order.advertise), lighthouse, transport, merge
        ),
        island=order.island,
        steps=order.steps,
        incarnation=uuid.uuid4().hex[:12],
        started=time.time(),
    )
    trace, drain = method.setup.trace, method.setup.drain
    signal.signal(signal.SIGTERM, lambda *_: drain.request("SIGTERM"))
    own = Path(order.folder) / f"island-{order.island}"
    trace.state("running")
    step = 0
    saved = own / SAVED
    if saved.exists():
        description = json.loads(saved.read_text())
        tensors = torch.load(own / "saved.pt", weights_only=True)
        model.load_state_dict(tensors.pop("model"))
        step = description.pop("step")
        method.restore(description, tensors)
    watch_traffic(method, own / "traffic.json")
    finished = False
    try:
        step = method.join(step)
        while not drain.is_set() and step < order.steps:
            began = time.monotonic()
            time.sleep(order.pace_s)
            with torch.no_grad():
                model.w.add_(0.1 * (order.island + 1))
            trace.step = step + 1
            try:
                step = method.after_inner_step(step + 1, 10)
            except Resumable as stopped:  # as DiLoCoTrainer.train_step
                step += 1
                drain.request(str(stopped))
            trace.event("inner", loss=0.0, tokens=10, seconds=time.monotonic() - began, lr=0.0)
        finished = step >= order.steps and method.complete()
        if not finished:
            method.pause()
            description, tensors = method.state()
            torch.save({**tensors, "model": model.state_dict()}, own / "saved.pt")
            saved.write_text(json.dumps({**description, "step": step}))
            trace.state("resume", drain.reason)
    except Resumable as stopped:  # as DiLoCoTrainer.batch_generator
        trace.state("resume", str(stopped))
    method.leave("done" if finished else "drain")
    if finished:
        trace.state("done")
    trace.close()
    sys.stderr.flush()
    os._exit(0)


def watch_traffic(method: Any, path: Path) -> None:
    """Keep what the exchange under way has moved in a file."""
    import threading

    def watch() -> None:
        while True:
            time.sleep(0.02)
            transport = method.transport
            for slot, (sent, received) in list(getattr(transport, "_traffic", _Nothing)._open.items()):
                path.write_text(json.dumps([slot, sent, received]))

    threading.Thread(target=watch, daemon=True).start()


class _Nothing:
    _open: dict[int, list[int]] = {}


if __name__ == "__main__":
    main()
