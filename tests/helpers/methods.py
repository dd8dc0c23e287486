"""The production method on a model that a test moves by hand: one island of one rank, over whatever transport."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.semi_sync import Setup, make_method
from torchtitan_diloco.semi_sync.diloco import DiLoCo


def method_of(
    model: nn.Module,
    config: SemiSyncConfig,
    folder: Path,
    make_transport: Callable[..., Any],
    *,
    island: int = 0,
    steps: int = 1000,
    sync_every: int | None = None,
    incarnation: str = "first",
    started: float = 0.0,
    run_id: str = "run",
    dump: bool = False,
) -> DiLoCo:
    """Not joined yet. Its trace, and with ``dump`` its sends, go below ``folder/island-<id>``."""
    group = IslandGroup()
    own = folder / f"island-{island}"
    method = make_method(
        Setup(
            config=config,
            steps=steps,
            sync_every=sync_every,
            island=island,
            incarnation=incarnation,
            started=started,
            run_id=run_id,
            group=group,
            parameters=IslandParameters([model], group),
            trace=Trace(own, island, incarnation),
            drain=DrainFlag(),
            make_transport=make_transport,
            dump_sends=own / "sends" if dump else None,
        )
    )
    assert isinstance(method, DiLoCo)
    return method
