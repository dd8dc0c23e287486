"""What the trainer of an island is told beside TorchTitan's own configuration."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.trainer import Trainer

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, SemiSyncConfig, TransportConfig


@dataclass(kw_only=True, slots=True)
class IslandTrainerConfig(Trainer.Config):
    """TorchTitan's fields and ours."""

    run_name: str = "run"
    """Name of the run; islands of another name are strangers."""
    island: IslandConfig = field(default_factory=IslandConfig)
    """Which island this is."""
    lighthouse: LighthouseConfig = field(default_factory=LighthouseConfig)
    """Membership."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """How deltas travel."""
    semi_sync: SemiSyncConfig = field(default_factory=SemiSyncConfig)
    """The method."""
    pace_step_seconds: float = 0.0
    """Stretch every inner step to this wall time by sleeping."""
    dump_sends: bool = False
    """Write the parameters at every send."""
    inject_faults: bool = False
    """Obey the file `inject` in the island's folder."""
    agreement: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Settings that must be equal on all islands."""
    written: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()
    """Dotted keys that the user wrote, as opposed to defaults."""
