"""How soon an island that was killed contributes again, and whether the island it heals from notices.

    python benchmarks/heal.py                 # gloo and hub, 3 minutes

Two islands of the quickstart with 12.5 million parameters, so that anchor and momentum are 100 MB; inner steps of 0.5 s
(paced), H = 10, overlap 3. Island 1's trainer is killed and started again by `run`. Measured: seconds from its `start` event
to the merge of the first slot in which its delta counts, against one window + 2 s; and the pauses between the other island's
inner steps meanwhile, longest over median. On a machine that others use as well both measure those others; then a miss is
said to be unresolved.
"""

import argparse
import itertools
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired import machine

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from tests.helpers.real_run import LocalRun, local_run, write_config  # noqa: E402
from torchtitan_diloco.data.prepare import prepare  # noqa: E402

PACE_S, SYNC_EVERY, SLACK_S = 0.5, 10, 2.0
BUSY = 1.1
"""Inner steps that take so much longer than their pace have waited for a core that somebody else had."""
SETTINGS = (
    *("--training.steps", "100000", "--debug.pace_step_seconds", str(PACE_S), "--metrics.log_freq", "1"),
    *("--semi_sync.sync_every", str(SYNC_EVERY), "--semi_sync.overlap", "3", "--model.vocab_size", "14400"),
    *("--training.local_batch_size", "1", "--checkpoint.enable=false"),
)


@dataclass(frozen=True)
class Heal:
    """joined, merged, applied: seconds from the `start` event to `join`, to the first merge in which the island's delta
    counts, and to its `round` event, which follows `overlap` steps later. pauses: between the donor's inner steps from the
    start until that merge."""

    taken: int
    seconds: float
    joined: float
    merged: float
    applied: float
    pauses: list[float]


def contributions(run: LocalRun, island: int, incarnation: int) -> list[dict[str, Any]]:
    """The slots in which this incarnation's delta counted."""
    starts = run.incarnations(island)
    events = starts[incarnation] if len(starts) > incarnation else []
    return [e for e in events if e["event"] == "round" and e["committed"] and island in e["participants"]]


def measure(kind: str, folder: Path, corpus: Path) -> Heal:
    with local_run(folder, write_config(folder, corpus), "--transport.kind", kind, *SETTINGS) as run:
        run.until(lambda: len(run.common_digests()) >= 2, 240)
        for victim in run.trainers(1):
            victim.kill()
        run.until(lambda: contributions(run, 1, 1), 240)
        back = run.incarnations(1)[1]
        slot = contributions(run, 1, 1)[0]
        began = back[0]["t"]
        sent = next(
            e["t"] for e in back if e["event"] == "inner" and e["step"] >= SYNC_EVERY * (slot["round"] + 1)
        )
        merged = sent + slot["exchange_s"]
        heals = [e for e in back if e["event"] == "heal"]
        joined = next(e["t"] for e in back if e["event"] == "join")
        steps = [e["t"] for e in run.events(0, "inner") if began <= e["t"] <= merged + PACE_S]
        run.process.kill()
        run.process.wait()
        time.sleep(3)
    return Heal(
        sum(e["bytes"] for e in heals),
        sum(e["seconds"] for e in heals),
        joined - began,
        merged - began,
        slot["t"] - began,
        [later - earlier for earlier, later in itertools.pairwise(steps)],
    )


def verdict(holds: bool, median: float) -> str:
    if holds:
        return "met"
    return "MISSED" if median <= BUSY * PACE_S else "not resolved: the machine is too busy for the pace"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transports", nargs="+", default=["gloo", "hub"])
    arguments = parser.parse_args(argv)
    print(f"command: {shlex.join(['python', 'benchmarks/heal.py', *argv])}")
    print(f"machine: {machine()}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        prepare(["bundled:kjv"], "bundled:bpe2048", 64, corpus)
        for kind in arguments.transports:
            place = Path(folder) / kind
            place.mkdir()
            heal, window = measure(kind, place, corpus), SYNC_EVERY * PACE_S
            longest, median = max(heal.pauses), statistics.median(heal.pauses)
            in_time = verdict(heal.merged <= window + SLACK_S, median)
            even = verdict(longest <= 1.5 * median, median)
            print(
                f"{kind}: after its start event it had joined in {heal.joined:.1f} s ({heal.taken / 1e6:.0f} MB taken in "
                f"{heal.seconds:.1f} s), its delta was merged in {heal.merged:.1f} s (at most {window:g} s + {SLACK_S:g} s: "
                f"{in_time}) and applied in {heal.applied:.1f} s; pauses of the other: longest {longest:.2f} s, median "
                f"{median:.2f} s, ratio {longest / median:.2f} (at most 1.5: {even}); paced at {PACE_S:g} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
