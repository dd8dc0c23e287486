"""One island of TorchTitan's own DiLoCo (torchtitan.experiments.torchft), for benchmarks/wan.py to set beside ours.

    python benchmarks/torchft_island.py --job.config_file FILE.toml --island.id N [--section.key value ...]

It reads our TOML, so that model, data, batch, inner optimizer, H and pace are the same. Trainer, exchange and outer
optimizer (SGD, lr 0.7, Nesterov momentum 0.9) are upstream's, unchanged. What had to be put around them:

- the CPU instead of a GPU, with the same adaptations as our trainer's (``torchtitan_diloco.cpu``)
- the host name that it advertises is MASTER_ADDR, since the machine's own name leads nowhere in a network namespace
- a hook before DiLoCo's own stretches each inner step to ``debug.pace_step_seconds``, as our trainer does

``inner`` events go where ours would write them. Environment: that of one rank, MASTER_ADDR being this island's address,
and TORCHFT_LIGHTHOUSE.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

socket.gethostname = lambda: os.environ["MASTER_ADDR"]  # torchft takes it as a default argument, at import

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torchtitan_diloco import cpu
from torchtitan_diloco.config.load import load_config, take_config_file
from torchtitan_diloco.configure import trainer_config
from torchtitan_diloco.island.metrics import IslandMetrics
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.process import die_with_parent
from torchtitan_diloco.train import end


class PacedTrainer(FaultTolerantTrainer):
    """Upstream's trainer with a pace and a trace."""

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerantTrainer.Config):
        island: int = 0
        """Number of this island."""
        pace_step_seconds: float = 0.0
        """Stretch every inner step to this wall time by sleeping."""

    config: Config
    metrics_processor: IslandMetrics

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        cpu.adapt_model(self.model_parts)
        self.trace = Trace(Path(config.dump_folder), config.island, "torchft")
        training = config.training
        self.metrics_processor.trace = self.trace
        self.metrics_processor.last_step = training.steps
        self.metrics_processor.tokens_per_step = training.local_batch_size * training.seq_len
        # Hooks run in the order of their registration, and DiLoCo's comes when training begins.
        self.optimizers.register_step_post_hook(self._rest)

    def train_step(self, data_iterator: Any) -> None:
        self._began = time.monotonic()
        self.trace.step = self.step
        super().train_step(data_iterator)
        self.metrics_processor.end_step(time.monotonic() - self._began)

    def _rest(self, *_: Any) -> None:
        time.sleep(max(0.0, self._began + self.config.pace_step_seconds - time.monotonic()))


def same_fields(target: Any, source: Any) -> dict[str, Any]:
    return {f.name: getattr(source, f.name) for f in fields(target) if hasattr(source, f.name)}


def upstream_config(words: Sequence[str]) -> PacedTrainer.Config:
    resolved = load_config(*take_config_file(list(words))).one_island()
    ours = trainer_config(resolved)
    islands, exchange_s = ours.semi_sync.num_islands, ours.transport.exchange_timeout_s
    config = PacedTrainer.Config(**same_fields(Trainer.Config, ours))
    cpu.adapt_config(config, ours.written)
    # One island to the loader: upstream divides batches by data-parallel rank, over all islands.
    config.dataloader.num_islands, config.dataloader.island_id = 1, 0
    # Upstream's fault-tolerant trainer never tells the chunked loss (the same, piece by piece) of the output layer.
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.optimizer = TorchFTOptimizersContainer.Config(
        **same_fields(TorchFTOptimizersContainer.Config, ours.optimizer)
    )
    config.checkpoint = TorchFTCheckpointManager.Config(enable=False)
    config.fault_tolerance = FaultTolerance(
        enable=True,
        replica_id=ours.island.id,
        group_size=islands,
        min_replica_size=islands,
        semi_sync_method="diloco",
        sync_steps=ours.semi_sync.sync_every,
        process_group="gloo",
        process_group_timeout_ms=int(1000 * exchange_s),
    )
    config.island, config.pace_step_seconds = ours.island.id, ours.pace_step_seconds
    return config


def main(words: Sequence[str]) -> None:
    die_with_parent()
    init_logger()
    trainer = upstream_config(words).build()
    try:
        trainer.train()
    finally:
        trainer.close()
    trainer.trace.event("end", tokens=trainer.ntokens_seen)
    trainer.trace.state("done")
    trainer.trace.close()
    end(0)


if __name__ == "__main__":
    main(sys.argv[1:])
