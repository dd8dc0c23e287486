"""How soon an island that was killed contributes again, and whether the island it heals from notices.

    python benchmarks/heal.py                 # gloo and hub, about 4 minutes

Two islands of the quickstart with 12.5 million parameters, so that anchor and momentum are 100 MB; inner steps of 0.5 s
(paced), H = 10, overlap 3. Island 1's trainer is killed and started again by `run`. Measured: seconds from its `start` event
to the first slot in which its delta counts, against one window + 2 s; and the pauses between the other island's inner
steps from then to then, longest over median.
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
from pathlib import Path

from paired import machine

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from tests.helpers.real_run import LocalRun, local_run, write_config  # noqa: E402
from torchtitan_diloco.data.prepare import prepare  # noqa: E402

PACE_S, SYNC_EVERY, SLACK_S = 0.5, 10, 2.0
SETTINGS = (
    *("--training.steps", "100000", "--debug.pace_step_seconds", str(PACE_S), "--metrics.log_freq", "1"),
    *("--semi_sync.sync_every", str(SYNC_EVERY), "--semi_sync.overlap", "3", "--model.vocab_size", "14400"),
    *("--training.local_batch_size", "1", "--checkpoint.enable=false"),
)


def contributions(run: LocalRun, island: int, incarnation: int) -> list[float]:
    """When the slots ended in which this incarnation's delta counted."""
    starts = run.incarnations(island)
    if len(starts) <= incarnation:
        return []
    events = starts[incarnation]
    return [
        e["t"] for e in events if e["event"] == "round" and e["committed"] and island in e["participants"]
    ]


def measure(kind: str, folder: Path, corpus: Path) -> tuple[float, float, float, int]:
    """(seconds to the first contribution, longest and median pause of the donor, bytes healed)."""
    with local_run(folder, write_config(folder, corpus), "--transport.kind", kind, *SETTINGS) as run:
        run.until(lambda: len(run.common_digests()) >= 2, 240)
        for victim in run.trainers(1):
            victim.kill()
        run.until(lambda: contributions(run, 1, 1), 240)
        back = run.incarnations(1)[1]
        began, ended = back[0]["t"], contributions(run, 1, 1)[0]
        healed = sum(e["bytes"] for e in back if e["event"] == "heal")
        steps = [e["t"] for e in run.events(0, "inner") if began - 5 <= e["t"] <= ended]
        run.process.kill()
        run.process.wait()
        time.sleep(3)
    pauses = [later - earlier for earlier, later in itertools.pairwise(steps)]
    return ended - began, max(pauses), statistics.median(pauses), healed


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
            seconds, longest, median, healed = measure(kind, place, corpus)
            window = SYNC_EVERY * PACE_S
            print(
                f"{kind}: contributed {seconds:.1f} s after its start event (window {window:g} s + {SLACK_S:g} s: "
                f"{'met' if seconds <= window + SLACK_S else 'MISSED'}); {healed / 1e6:.0f} MB taken; pauses of the other: "
                f"longest {longest:.2f} s, median {median:.2f} s, ratio {longest / median:.2f} "
                f"({'met' if longest <= 1.5 * median else 'MISSED'}, at most 1.5)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
