"""The command line and the environment of one island's trainer on this machine."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco.observe.events import INCARNATION
from torchtitan_diloco.process import LAUNCHER_PID

RUN_ID = "TORCHTITAN_DILOCO_RUN_ID"

# TORCHFT_* beats arguments in torchft, PET_* is torchrun's own second way to give options: one setting, one place.
_REMOVED_PREFIXES = ("TORCHFT_", "PET_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one island."""

    island: int
    ranks: int
    incarnation: str
    run_id: str
    config_file: Path
    meeting: tuple[str, ...]
    """Arguments that say where the islands meet; none where the method needs that not."""


def trainer_arguments(launch: Launch) -> list[str]:
    """What follows the trainer's name on its command line."""
    own = ["--job.config_file", str(launch.config_file), "--island.id", str(launch.island)]
    return [*own, *launch.meeting]


def torchrun_command(launch: Launch) -> list[str]:
    """One torchrun world on loopback that never restarts by itself: a restarted island is a new incarnation."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(launch.ranks), "--max-restarts", "0"),
        # Port 0: torchrun itself picks a free one, so that two runs never meet.
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--rdzv-id", f"{launch.run_id}-{launch.incarnation}"),
        *("-m", "torchtitan_diloco.train", *trainer_arguments(launch)),
    ]


def trainer_environment(
    launch: Launch, base: Mapping[str, str], *, total_ranks: int, loopback_only: bool
) -> dict[str, str]:
    """`base` without what would override our settings, plus the job's identity.

    `total_ranks` of all islands share this machine's cores; `loopback_only`: every peer is on this machine.
    """
    environment = {k: v for k, v in base.items() if not k.startswith(_REMOVED_PREFIXES)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // total_ranks)))
    if loopback_only:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONUNBUFFERED"] = "1"
    environment[RUN_ID] = launch.run_id
    environment[INCARNATION] = launch.incarnation
    environment[LAUNCHER_PID] = str(os.getpid())
    return environment
