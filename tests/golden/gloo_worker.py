"""One process that trains its part of several golden runs, one after the other, over the gloo transport.

Run as: python -m tests.golden.gloo_worker RUNS_FILE PROCESS. A process that no island of a run lists sits it out.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.golden.island import Case, Island, Plan
from tests.golden.reference import sha256
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.train import end


def shard(model: nn.Module) -> None:
    """FSDP2 over all ranks of the island; plain sums, since gloo has no ReduceOp.AVG."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def train(run: dict[str, Any], number: int, rank: int, folder: Path) -> None:
    ranks = len(run["islands"][number])
    if ranks > 1:
        store = dist.FileStore(str(folder.parent / f"{run['name']}-{number}.store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    lighthouse = LighthouseConfig(address=run["lighthouse"], quorum_interval_s=0.05, patience_s=60.0)
    island = Island(
        number,
        Plan(**run["plans"][number]),
        Case(**run["case"]),
        folder,
        lambda merge: GlooTransport(
            IslandConfig(id=number), lighthouse, TransportConfig(exchange_timeout_s=30.0), merge
        ),
        islands=len(run["islands"]),
        run_id=run["name"],
        shard=shard if ranks > 1 else lambda model: None,
    )
    island.train()
    island.finish()
    if rank == 0:
        (folder / f"island-{number}" / "cpu.json").write_text(json.dumps(describe_cpu()))
    if ranks > 1:
        dist.destroy_process_group()


def describe_cpu() -> dict[str, Any]:
    """How this process computes; ``fused`` is a digest of what one instruction rounds once and two round twice."""
    values = torch.arange(1, 100_001, dtype=torch.float32) / 7
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "fused": sha256(torch.add(values, values.flip(0), alpha=0.9).numpy()),
    }


def main() -> None:
    runs, process = Path(sys.argv[1]), int(sys.argv[2])
    for run in json.loads(runs.read_text()):
        for number, processes in enumerate(run["islands"]):
            if process in processes:
                train(run, number, processes.index(process), runs.parent / run["name"])
    end(0)


if __name__ == "__main__":
    main()
