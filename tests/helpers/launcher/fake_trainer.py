"""Stands in for a trainer rank: trains nothing, but writes the trace of the contract and obeys SIGTERM.

What it does beyond that is told by the JSON in FAKE_TRAINER: {"steps", "step_s"} and, with islands as strings,
"crash" {island: step}, "fatal" {island: reason}, "digest" {island: text}, "deaf", "dies_late" and "unsaved"
[island numbers].
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from torchtitan_diloco.process import die_with_parent

die_with_parent()

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
island = arguments["--island.id"]
folder = Path(arguments["--job.config_file"]).parent / f"island-{island}"
script = json.loads(os.environ["FAKE_TRAINER"])
incarnation = os.environ["TORCHTITAN_DILOCO_INCARNATION"]
leader = os.environ["RANK"] == "0"
drained: list[int] = []
if int(island) in script.get("deaf", []):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda number, _: drained.append(number))


def event(kind: str, step: int, **fields: object) -> None:
    if leader:
        line = {
            "t": time.time(),
            "event": kind,
            "island": int(island),
            "incarnation": incarnation,
            "step": step,
            **fields,
        }
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def state(name: str, step: int, reason: str = "") -> None:
    if leader:
        content = {
            "state": name,
            "reason": reason,
            "step": step,
            "island": int(island),
            "incarnation": incarnation,
        }
        unfinished = folder / ".state"
        unfinished.write_text(json.dumps({**content, "pid": os.getpid(), "t": time.time()}))
        unfinished.replace(folder / "state.json")


def main() -> int:
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    if leader:
        print("fake trainer", json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
    if reason := script.get("fatal", {}).get(island):
        state("fatal", step, reason)
        return 1
    state("running", step)
    event("start", step)
    while step < script["steps"]:
        if drained:
            if leader and int(island) not in script.get("unsaved", []):
                saved.write_text(str(step))
                checkpoint = folder / "checkpoint" / f"step-{step}"
                checkpoint.mkdir(parents=True, exist_ok=True)
                (checkpoint / ".metadata").touch()
            state("resume", step, "signal")
            return 0
        time.sleep(script["step_s"])
        step += 1
        event("inner", step, loss=8.0 / (step + 1), tokens=100, seconds=0.5, lr=0.1)
        if step % 2 == 0:
            digest = script.get("digest", {}).get(island, "ab" * 32)
            event("round", step, round=step // 2, committed=True, stall_s=0.001, digest=digest)
        if script.get("crash", {}).get(island) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    event("end", step, tokens=100 * step)
    if int(island) in script.get("dies_late", []):
        os.abort()
    state("done", step)
    return 0


sys.exit(main())
