"""Islands of several ranks whose trainers average their gradients, as cases of ``tests.helpers.world``."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import islands, tiny
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig
from torchtitan_diloco.island.metrics import IslandMetrics
from torchtitan_diloco.semi_sync.sync import GradientSync
from torchtitan_diloco.trainer import DiLoCoTrainer

STEPS = 8
OPTIONS: dict[str, Any] = {"steps": STEPS, "vocab": 64, "batch": 2, "lr": 3e-3, "training.max_norm": 0.5}


class SplitLoader(tiny.SyntheticDataLoader):
    """What the same number of ranks would read as one island: island i has the rows of the i-th part of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(tiny.SyntheticDataLoader.Config):
        island: int = 0
        islands: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **arguments: Any) -> None:
        super().__init__(
            config,
            dp_world_size=config.islands * dp_world_size,
            dp_rank=config.island * dp_world_size + dp_rank,
            **arguments,
        )


def config_of(lighthouse: str, folder: Path, island: int, **options: Any) -> Any:
    chosen = {**OPTIONS, **options}
    return tiny.tiny_trainer_config(
        DiLoCoTrainer.Config,
        dump_folder=str(folder),
        metrics=IslandMetrics.Config(log_freq=1, disable_color_printing=True),
        dataloader=SplitLoader.Config(vocab=chosen["vocab"], island=island, islands=2),
        island=IslandConfig(id=island),
        lighthouse=LighthouseConfig(address=lighthouse, heartbeat_interval_s=0.1, patience_s=60.0),
        semi_sync=SemiSyncConfig(method="sync", sync_every=4, num_islands=2),
        **chosen,
    )


def become(island: int, rank: int, ranks: int, port: int) -> None:
    """The world of this process is that of its island."""
    os.environ.update(tiny.rank_environment(rank, ranks, port))


def train(
    *, lighthouse: str, folder: str, ports: list[int], ranks: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Two islands of ``ranks`` ranks each."""
    island, rank = divmod(int(os.environ["RANK"]), ranks)
    become(island, rank, ranks, ports[island])
    own = Path(folder) / f"island-{island}"
    hooked: list[bool] = []
    leave = GradientSync.leave

    def leaving(self: GradientSync, reason: str) -> None:
        hooked.append(self.hooked)
        leave(self, reason)

    with mock.patch.object(GradientSync, "leave", leaving):
        facts = islands.run_to_the_end(config_of(lighthouse, own, island, **options))
    return {**facts, "hooked": hooked[0]}


def lose_one(
    *, lighthouse: str, folder: str, ports: list[int], ranks: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Of three sets of ranks the second is an island that dies in its fourth step, and the third comes back in its place."""
    part, rank = divmod(int(os.environ["RANK"]), ranks)
    island = min(part, 1)
    become(island, rank, ranks, ports[part])
    own, alone, back = Path(folder) / f"island-{island}", Path(folder) / "alone", Path(folder) / "back"
    if part == 2:
        os.environ["TORCHTITAN_DILOCO_INCARNATION"] = "second"
        while not alone.exists():
            time.sleep(0.05)
        options = {**options, "debug.seed": 99}  # other weights, until it takes those of the run
    step = GradientSync.after_backward

    def dying(self: GradientSync) -> None:
        if part == 1 and self.account.step == 3 and rank == ranks - 1:
            os._exit(1)
        if part == 0 and self.account.step == 6:  # without the other
            alone.touch()
        if part == 2:
            back.touch()
        elif alone.exists() and not back.exists():
            time.sleep(1.0)  # the run is not over before the island is back, on however busy a machine
        step(self)

    with mock.patch.object(GradientSync, "after_backward", dying):
        return islands.run_to_the_end(config_of(lighthouse, own, island, **options))
