"""Two islands over an emulated wide-area link: seconds an exchange, utilisation, and what a slow link costs a run.

    python benchmarks/wan.py                                           # as root, Linux; some 45 minutes
    python benchmarks/wan.py --arms plain --rates 100 --repeats 1      # two minutes

TorchTitan's llama3 debug model (6.16 M parameters) on the bundled text, float32, 4 x 128 tokens a step, H = 20. Each island
is one process in a network namespace of its own; a Lighthouse stands at the first. Arms, all with the same steps:

    torchft      TorchTitan's own experiments/torchft DiLoCo, fp32
    plain        ours, fp32, everything at once, training waits for it
    streaming    ours, 4 fragments in turn, fp4, applied some steps later while training goes on

Every inner step is stretched to the same wall time by sleeping (``debug.pace_step_seconds``), so that islands which share
cores do not measure one another: what all processes of a run use together is printed, and should stay below 60 %.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from emulated_wan import DEVICE, QUEUE_S, Wan
from paired import machine

from torchtitan_diloco.observe.reading import EventTail, read_state

REPO = Path(__file__).parents[1]
CONFIG = REPO / "train_configs" / "quickstart.toml"
CORPUS = Path("outputs/data/kjv-bpe2048-128")  # as that file says
PARAMETERS = 6_163_712
SYNC_EVERY = 20
ISLANDS = 2
TAIL_STEPS = 20
"""The final loss is the mean over the last steps of both islands: one window, as single batches differ by more than arms."""

Words = dict[str, str]
ARMS: dict[str, Words] = {
    "torchft": {},
    "plain": {"semi_sync.codec.wire": "fp32"},
    "streaming": {"semi_sync.codec.wire": "fp4_e3m0", "semi_sync.fragments": "4"},
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=[100.0, 20.0], help="Mbit/s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="inner steps, a multiple of 20")
    parser.add_argument("--pace", type=float, default=0.6, help="seconds of an inner step")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of the link, one way")
    parser.add_argument("--overlap", type=int, default=2, help="tau of the streaming arm, in steps")
    parser.add_argument("--congestion", help="TCP congestion control; the machine's own if not given")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets lost by chance")
    parser.add_argument("--streams", type=int, default=1, help="transport.streams of our arms")
    parser.add_argument("--results", type=Path, help="file of finished runs; those in it are not run again")
    arguments = parser.parse_args(argv)
    if arguments.steps % SYNC_EVERY or arguments.steps < 3 * SYNC_EVERY:
        parser.error(f"--steps: a multiple of {SYNC_EVERY}, at least {3 * SYNC_EVERY}")
    if not 0 < arguments.overlap < SYNC_EVERY // 4:
        parser.error(f"--overlap: from 1 to {SYNC_EVERY // 4 - 1}")
    return arguments


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Which run: everything that its figures depend on."""

    arm: str
    rate_mbit: float  # 0 = unlimited, and without delay
    repeat: int
    steps: int
    pace_s: float
    delay_ms: float
    overlap: int
    congestion: str
    loss: float = 0.0
    streams: int = 1


@dataclass(slots=True)
class Result:
    """What a run showed. Lists are by island, then by step or slot.

    cpu: share of all cores that the run's own processes used while it trained; machine_cpu: that all processes used.
    """

    seconds: list[list[float]]
    losses: list[list[float]]
    rounds: list[list[dict[str, Any]]]
    wall_s: float
    cpu: float
    machine_cpu: float

    def steady(self) -> Iterator[tuple[list[float], list[float]]]:
        """By island: the seconds of steps without and with an exchange, without the first window, in which all is cold."""
        for steps in self.seconds:
            yield (
                [s for i, s in enumerate(steps, 1) if i > SYNC_EVERY and i % SYNC_EVERY],
                [s for i, s in enumerate(steps, 1) if i > SYNC_EVERY and i % SYNC_EVERY == 0],
            )

    @property
    def step_s(self) -> float:
        """An inner step by itself."""
        return statistics.median(s for without, _ in self.steady() for s in without)

    @property
    def stall_s(self) -> float:
        """What an exchange adds to its step: time in which nothing is trained."""
        return statistics.mean(s for _, exchanged in self.steady() for s in exchanged) - self.step_s

    @property
    def utilisation(self) -> float:
        """Share of the time that is inner steps."""
        every = [s for without, exchanged in self.steady() for s in (*without, *exchanged)]
        return self.step_s * len(every) / sum(every)

    @property
    def exchange_s(self) -> float:
        """From the later island's offer of a slot to its outcome, without the slots of the first window; ours only."""
        slots: dict[int, list[float]] = {}
        for event in (e for mine in self.rounds for e in mine if e["step"] > SYNC_EVERY and e["committed"]):
            slots.setdefault(event["round"], []).append(event["exchange_s"])
        return statistics.mean(min(both) for both in slots.values())

    @property
    def loss(self) -> float:
        return statistics.mean(x for losses in self.losses for x in losses[-TAIL_STEPS:])


def words_of(run: Run, island: int, lighthouse: str) -> list[str]:
    settings = {
        "job.dump_folder": "outputs",
        "job.name": "wan",
        "training.steps": str(run.steps),
        "metrics.log_freq": "1",
        "metrics.enable_tensorboard": "false",
        "checkpoint.enable": "false",
        "debug.pace_step_seconds": str(run.pace_s),
        "debug.enable_structured_logging": "false",
        "semi_sync.sync_every": str(SYNC_EVERY),
        **ARMS[run.arm],
        "island.id": str(island),
        "lighthouse.address": lighthouse,
    }
    if run.arm == "streaming":
        settings["semi_sync.overlap"] = str(run.overlap)
    if run.arm != "torchft":
        settings["transport.streams"] = str(run.streams)
    return ["--job.config_file", str(CONFIG), *(w for k, v in settings.items() for w in (f"--{k}", v))]


def island_environment(address: str, lighthouse: str) -> dict[str, str]:
    """That of one rank; each island has a loopback, and with it all ports, to itself."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    }


@contextlib.contextmanager
def started(
    folder: Path, name: str, command: list[str], environment: dict[str, str]
) -> Iterator[psutil.Popen]:
    with (folder / f"{name}.log").open("w") as log:
        process = psutil.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class CpuMeter:
    """CPU time of some processes, and of the machine, from the first to the latest reading."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._first = self._latest = self._read()

    def _read(self) -> tuple[float, float, float]:
        own = sum(sum(p.cpu_times()[:2]) for p in self._processes)
        everything = psutil.cpu_times()
        return time.monotonic(), own, sum(everything) - everything.idle - everything.iowait

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile: the reading before is the last
            self._latest = self._read()

    def shares(self) -> tuple[float, float]:
        seconds, own, everything = (b - a for a, b in zip(self._first, self._latest, strict=True))
        return own / seconds / os.cpu_count(), everything / seconds / os.cpu_count()


def execute(run: Run, folder: Path) -> Result:
    """Start everything, wait for its end and read what it wrote. Raises RuntimeError when an island fails."""
    limited = run.rate_mbit > 0
    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(
            Wan(
                ISLANDS,
                run.rate_mbit * 1e6,
                run.delay_ms / 1000 if limited else 0.0,
                None if run.congestion == "default" else run.congestion,
                run.loss if limited else 0.0,
            )
        )
        lighthouse = f"http://{wan.address(0)}:29510"
        python = [sys.executable, "-m", "torchtitan_diloco"]
        processes = [
            psutil.Process(wan.pid),
            stack.enter_context(
                started(
                    folder,
                    "lighthouse",
                    wan.command(0, [*python, "lighthouse", "--bind", f"{wan.address(0)}:29510"]),
                    island_environment(wan.address(0), lighthouse),
                )
            ),
        ]
        trainer = (
            [str(REPO / "benchmarks" / "torchft_island.py")]
            if run.arm == "torchft"
            else ["-m", "torchtitan_diloco.train"]
        )
        islands = [
            stack.enter_context(
                started(
                    folder,
                    f"island-{i}",
                    wan.command(i, [sys.executable, *trainer, *words_of(run, i, lighthouse)]),
                    island_environment(wan.address(i), lighthouse),
                )
            )
            for i in range(ISLANDS)
        ]
        tails = [
            EventTail(folder / "outputs" / "wan" / f"island-{i}" / "events.jsonl") for i in range(ISLANDS)
        ]
        events: list[list[dict[str, Any]]] = [[] for _ in islands]
        meter = None
        while any(process.poll() is None for process in islands):
            time.sleep(0.25)
            for seen, tail in zip(events, tails, strict=True):
                seen.extend(tail.read())
            if any(process.poll() for process in islands):
                break
            if meter is not None:
                meter.look()
            elif all(any(e["event"] == "inner" for e in seen) for seen in events):
                meter = CpuMeter([*processes, *islands])
        for seen, tail in zip(events, tails, strict=True):
            seen.extend(tail.read())
        for i, process in enumerate(islands):
            state = read_state(folder / "outputs" / "wan" / f"island-{i}")
            if process.poll() or state is None or state.state != "done" or meter is None:
                raise RuntimeError(f"island {i} failed:\n{(folder / f'island-{i}.log').read_text()[-4000:]}")
    return summary(events, meter.shares())


def summary(events: list[list[dict[str, Any]]], cpu: tuple[float, float]) -> Result:
    inner = [[e for e in seen if e["event"] == "inner"] for seen in events]
    kept = ("step", "round", "committed", "exchange_s", "stall_s", "bytes_sent", "tokens")
    return Result(
        seconds=[[e["seconds"] for e in mine] for mine in inner],
        losses=[[e["loss"] for e in mine] for mine in inner],
        rounds=[[{k: e[k] for k in kept} for e in seen if e["event"] == "round"] for seen in events],
        wall_s=max(mine[-1]["t"] - mine[0]["t"] for mine in inner),
        cpu=cpu[0],
        machine_cpu=cpu[1],
    )


# ---- all of them -----------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> list[Run]:
    """Runs that are compared stand beside one another, and each repeat turns their order round."""
    runs = []
    for repeat in range(arguments.repeats):
        rates = [0.0, *arguments.rates]
        for rate in reversed(rates) if repeat % 2 else rates:
            for arm in arguments.arms:
                if rate or arm == "streaming":  # the others are set against the wire's limit
                    runs.append(
                        Run(
                            arm, rate, repeat, arguments.steps, arguments.pace, arguments.delay_ms,
                            arguments.overlap, arguments.congestion or "default", arguments.loss,
                            1 if arm == "torchft" else arguments.streams,
                        )
                    )  # fmt: skip
    return runs


def earlier_results(path: Path | None) -> dict[Run, Result]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {Run(**line["run"]): Result(**line["result"]) for line in lines}


def measure(arguments: argparse.Namespace) -> dict[Run, Result]:
    done = earlier_results(arguments.results)
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name) / "corpus"
        for run in plan(arguments):
            if run in done:
                continue
            if not corpus.exists():
                prepare_corpus(corpus)
            folder = Path(name) / f"{run.arm}-{run.rate_mbit:g}-{run.repeat}"
            (folder / CORPUS.parent).mkdir(parents=True)
            (folder / CORPUS).symlink_to(corpus)
            done[run] = result = execute(run, folder)
            print(line(run, result), flush=True)
            if arguments.results is not None:
                with arguments.results.open("a") as file:
                    file.write(json.dumps({"run": asdict(run), "result": asdict(result)}) + "\n")
    return {run: done[run] for run in plan(arguments)}


def prepare_corpus(folder: Path) -> None:
    from torchtitan_diloco.data.prepare import prepare

    prepare(["bundled:kjv"], "bundled:bpe2048", 128, folder)


def wire_limit_s(rate_mbit: float) -> float:
    """Seconds in which the link carries all parameters in float32 once; both directions at the same time."""
    return 4 * PARAMETERS * 8 / (rate_mbit * 1e6)


def line(run: Run, result: Result) -> str:
    link = f"{run.rate_mbit:g} Mbit/s" if run.rate_mbit else "unlimited"
    return (
        f"{run.arm:10} {link:>11} #{run.repeat}  wall {result.wall_s:6.1f} s  stall {result.stall_s:6.2f} s an exchange  "
        f"utilisation {100 * result.utilisation:5.1f} %  loss {result.loss:.4f}  "
        f"CPU {100 * result.cpu:.0f} % (machine {100 * result.machine_cpu:.0f} %)"
    )


def report(arguments: argparse.Namespace, argv: Sequence[str], results: dict[Run, Result]) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchtitan", "torchft"))
    print(f"\ncommand: {shlex.join(['python', 'benchmarks/wan.py', *argv])}")
    print(f"machine: {machine()}; {versions}")
    print(
        f"link: {arguments.delay_ms:g} ms each way, queue {1000 * QUEUE_S:g} ms, TCP {congestion_control(arguments)}; "
        f"{arguments.steps} steps of {arguments.pace:g} s, H = {SYNC_EVERY}, {arguments.repeats} repeats; "
        f"loss {100 * arguments.loss:g} %, {arguments.streams} streams"
    )
    for run, result in results.items():
        print(line(run, result))
    print("\nmedian (lowest to highest):")
    for rate in arguments.rates:
        print(f"{rate:g} Mbit/s, on which an fp32 exchange takes {wire_limit_s(rate):.2f} s at least")
        for arm in arguments.arms:
            for figure, values in figures(arm, rate, results):
                print(f"  {arm:10} {figure:45} {spread(values)}")


def figures(arm: str, rate: float, results: dict[Run, Result]) -> Iterator[tuple[str, list[float]]]:
    """What an arm showed at a rate: names, each with its values by repeat."""

    def repeats(arm: str, rate: float) -> dict[int, Result]:
        return {run.repeat: r for run, r in results.items() if (run.arm, run.rate_mbit) == (arm, rate)}

    mine, limit = repeats(arm, rate), wire_limit_s(rate)
    yield "s without training, an exchange", [r.stall_s for r in mine.values()]
    yield "utilisation, %", [100 * r.utilisation for r in mine.values()]
    if arm != "torchft":
        yield "s from offer to outcome", [r.exchange_s for r in mine.values()]
    if arm != "streaming":
        yield "s without training, over the wire limit", [r.stall_s / limit for r in mine.values()]
    if arm == "plain":
        yield "s from offer to outcome, over the wire limit", [r.exchange_s / limit for r in mine.values()]
    if arm == "streaming":
        free, plain = repeats("streaming", 0.0), repeats("plain", rate)
        yield (
            "wall time, over that with an unlimited link",
            [r.wall_s / free[i].wall_s for i, r in mine.items()],
        )
        if plain:
            yield "final loss, over plain's", [r.loss / plain[i].loss for i, r in mine.items()]


def congestion_control(arguments: argparse.Namespace) -> str:
    return arguments.congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.3f} ({min(values):.3f} to {max(values):.3f})"


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    results = measure(arguments)
    report(arguments, argv, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
