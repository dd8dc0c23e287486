"""One rank of islands that found runs, one after the other, from weights and histories that a test says.

Run as: python -m tests.helpers.founding_worker RUNS_FILE PROCESS.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.golden.gloo_run import GlooRun
from tests.golden.gloo_worker import shard
from tests.golden.island import Case, Island, Plan, whole
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.island.parameters import canonical_tensors
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.train import end


@dataclass(frozen=True)
class Founding(GlooRun):
    """values: that fill each island's parameters. slots: that each has committed. delays: seconds before it joins."""

    values: tuple[float, ...] = field(kw_only=True)
    slots: tuple[int, ...] = field(kw_only=True)
    delays: tuple[float, ...] = field(kw_only=True)


def found(run: dict[str, Any], number: int, rank: int, folder: Path) -> dict[str, Any]:
    """What the rank holds once its island is in: the values of all parameters, and the step it goes on from."""
    plan, slots = Plan(**run["plans"][number]), run["slots"][number]
    lighthouse = LighthouseConfig(address=run["lighthouse"], quorum_interval_s=0.05, patience_s=60.0)
    island = Island(
        number, plan, Case(**run["case"]), folder,
        lambda merge: GlooTransport(IslandConfig(id=number), lighthouse, TransportConfig(), merge),
        islands=len(run["islands"]), run_id=run["name"], shard=shard,
    )  # fmt: skip
    method = island.method
    with torch.no_grad():
        for _, tensor in canonical_tensors([island.model]):
            tensor.fill_(run["values"][number])
    if slots and island.group.is_gateway:
        anchors = [torch.full((f.numel,), run["values"][number]) for f in method.fragments]
        method.outer = method._found(anchors)
        for slot in range(slots):
            still = Merged.of(torch.zeros(method.fragments[0].numel))
            advance = method.outer.outer_step(0, slot)(still)
            method.outer.commit(slot, 0, advance, [number], 100, {}, {number: {}})
    method.next_slot = slots
    time.sleep(run["delays"][number])
    step = method.join(slots * plan.sync_every)
    held = {name: whole(tensor).unique().tolist() for name, tensor in canonical_tensors([island.model])}
    method.leave("drain")
    return {"step": step, "held": held}


def main() -> None:
    runs, process = Path(sys.argv[1]), int(sys.argv[2])
    for run in json.loads(runs.read_text()):
        for number, processes in enumerate(run["islands"]):
            if process not in processes:
                continue
            rank = processes.index(process)
            store = dist.FileStore(str(runs.parent / f"{run['name']}-{number}.store"), len(processes))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(processes))
            result = found(run, number, rank, runs.parent / run["name"])
            (runs.parent / f"{run['name']}-{process}.json").write_text(json.dumps(result))
            dist.destroy_process_group()
    end(0)


if __name__ == "__main__":
    main()
