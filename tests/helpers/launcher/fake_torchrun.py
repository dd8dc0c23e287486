"""Stands in for torchrun: starts RANKS workers in sessions of their own, ends 1 when one fails, else 0."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    ranks = int(sys.argv[1])
    worker = Path(__file__).with_name("fake_trainer.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker), *sys.argv[2:]],
            env={**os.environ, "RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [w.kill() for w in workers])
    while any(w.poll() is None for w in workers):
        if any(w.poll() for w in workers):
            break
        time.sleep(0.02)
    for w in workers:
        w.kill()
    return int(any(w.wait() for w in workers))


sys.exit(main())
