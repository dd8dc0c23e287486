"""Cases that need several ranks, for the price of one start: a process imports everything and forks each case's ranks.

Every case has fresh processes, since TorchTitan and DTensor keep the meshes of a process's first trainer. The process
that forks is run as: python -m tests.helpers.world ORDER_FILE
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]


def run_cases(folder: Path, cases: Mapping[str, dict[str, Any]], timeout_s: float = 60) -> None:
    """Run each named case on ``case["size"]`` ranks: ``case["call"]`` ("module:function") with the other items.

    timeout_s: for one case; its ranks are then killed. ``facts`` reads what the functions returned.
    """
    from tests.helpers import tiny

    order = [
        {"name": name, "timeout_s": timeout_s, "port": tiny.free_port(), **case}
        for name, case in cases.items()
    ]
    (folder / "order.json").write_text(json.dumps(order))
    with open(folder / "cases.log", "wb") as log:
        command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.world", str(folder / "order.json")]
        subprocess.run(command, cwd=REPO, stdout=log, stderr=subprocess.STDOUT, check=True)


def facts(folder: Path, case: str) -> list[dict[str, Any]]:
    """What the case returned, on each rank. Fails the test where it raised, or never ended."""
    outcomes = json.loads((folder / f"{case}.json").read_text())
    for rank, outcome in enumerate(outcomes):
        log = (folder / f"{case}.log").read_text(errors="replace")[-3000:]
        assert "facts" in outcome, f"rank {rank}, case {case!r}: {outcome['raised']}\n{log}"
    return [outcome["facts"] for outcome in outcomes]


def start_rank(rank: int, case: dict[str, Any], log: int, result: Path) -> int:
    """Fork; the child runs the case as ``rank`` and writes what came out to ``result``. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.helpers import tiny

    module, function = case["call"].split(":")
    arguments = {k: v for k, v in case.items() if k not in ("name", "size", "port", "timeout_s", "call")}
    os.environ.update(tiny.rank_environment(rank, case["size"], case["port"]))
    try:
        outcome = {"facts": getattr(importlib.import_module(module), function)(**arguments)}
    except BaseException:  # noqa: BLE001  (told to the test that looks at this case)
        outcome = {"raised": traceback.format_exc()}
    result.write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # no clean-up of what the parent owns


def run_case(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    results = [folder / f"{case['name']}.rank-{rank}.json" for rank in range(case["size"])]
    with open(folder / f"{case['name']}.log", "wb") as log:
        running = {start_rank(rank, case, log.fileno(), result) for rank, result in enumerate(results)}
        end = time.monotonic() + case["timeout_s"]
        while running:
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    running.remove(pid)
            if time.monotonic() > end:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                break
            time.sleep(0.01)
    return [
        json.loads(result.read_text()) if result.exists() else {"raised": "the rank did not end"}
        for result in results
    ]


def main() -> None:
    order_file = Path(sys.argv[1])
    order = json.loads(order_file.read_text())
    for case in order:
        importlib.import_module(case["call"].split(":")[0])  # paid once, before the first fork
    for case in order:
        outcomes = run_case(case, order_file.parent)
        (order_file.parent / f"{case['name']}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
