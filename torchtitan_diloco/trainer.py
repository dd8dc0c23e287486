"""TorchTitan's trainer with a semi-synchronous method beside it.

Everything that trains is TorchTitan's. This class adds five things at its hooks: it joins the run between loading a
checkpoint and the first inner step, lets the method lead every inner step, stops between inner steps when asked to, paces
steps for honest measurement, and keeps the trace.
"""

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.trainer import Trainer

from torchtitan_diloco import cpu, semi_sync
from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
from torchtitan_diloco.data.ledger import Ledger
from torchtitan_diloco.data.loader import CorpusDataLoader
from torchtitan_diloco.errors import Resumable
from torchtitan_diloco.exchange import make_transport
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.metrics import IslandMetrics
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.island.replica import Replica
from torchtitan_diloco.island.schedule import move_schedule
from torchtitan_diloco.island.settings import IslandTrainerConfig
from torchtitan_diloco.island.trial import Trial
from torchtitan_diloco.observe.events import INCARNATION, Trace
from torchtitan_diloco.semi_sync.lockstep import open_lockstep

RUN_ID = "TORCHTITAN_DILOCO_RUN_ID"
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

GROUP_TIMEOUT_S = 3600.0
"""Ranks of an island meet at least every few seconds while they wait for others, so this only catches a dead rank."""


class DiLoCoTrainer(Trainer):
    """One rank of one island."""

    @dataclass(kw_only=True, slots=True)
    class Config(IslandTrainerConfig):
        """Declared here so that it builds this trainer."""

    config: Config
    metrics_processor: IslandMetrics
    step: int
    ntokens_seen: int

    def __init__(self, config: Config) -> None:
        self.started = time.time()
        self.drain = DrainFlag()
        self.drain.install()
        self.drained = self.finished = False
        cpu.adapt_config(config, config.written)
        super().__init__(config)
        cpu.adapt_model(self.model_parts)
        self.group = IslandGroup(GROUP_TIMEOUT_S)
        self.incarnation = self.group.tell(os.environ.get(INCARNATION) or uuid.uuid4().hex[:12])
        folder = Path(config.dump_folder)
        self.trace = Trace(folder if self.group.rank == 0 else None, config.island.id, self.incarnation)
        self.trial = Trial(config.pace_step_seconds, folder if config.inject_faults else None)
        self.trace.event("start")
        self.trace.state("running")
        dims, training = self.parallel_dims, config.training
        sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        self.tokens_per_step = self.gradient_accumulation_steps * sequences * training.seq_len
        self.metrics_processor.trace = self.trace
        self.metrics_processor.tokens_per_step = self.tokens_per_step
        self.method = semi_sync.make_method(self._setup(folder))
        # The schedule is built, for the run's steps; from here on the loop counts the island's.
        training.steps = self.method.last_step() or training.steps
        self.metrics_processor.last_step = training.steps
        if isinstance(self.checkpointer, IslandCheckpointManager):
            self.checkpointer.outer_state = self.method.state
            self.checkpointer.saved = self._trace_checkpoint

    def _setup(self, folder: Path) -> semi_sync.Setup:
        config = self.config
        network = config.island, config.lighthouse, config.transport
        feed = self.dataloader if isinstance(self.dataloader, CorpusDataLoader) else None
        one_history = config.semi_sync.method != "none" or config.semi_sync.num_islands == 1
        keeps_ledger = feed is not None and self.group.is_gateway and one_history
        return semi_sync.Setup(
            config=config.semi_sync,
            steps=config.training.steps,
            island=config.island.id,
            incarnation=self.incarnation,
            started=self.started,
            run_id=os.environ.get(RUN_ID, config.run_name),
            group=self.group,
            parameters=IslandParameters(self.model_parts, self.group),
            trace=self.trace,
            drain=self.drain,
            make_transport=partial(make_transport, *network),
            sync_every=config.island.own_sync_every,
            settings=config.agreement,
            feed=feed,
            ledger=Ledger(folder, config.island.id) if keeps_ledger else None,
            dump_sends=folder / "sends" if config.dump_sends else None,
            make_lockstep=partial(open_lockstep, *network),
            replica=Replica(self.model_parts, self.optimizers.optimizers, self.gradient_accumulation_steps),
        )

    # ---- TorchTitan's hooks ----------------------------------------------------------------------------------------

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Called once, after the checkpoint is loaded and before the first step: the place to enter the run."""
        self.trace.step = self.step
        if isinstance(self.checkpointer, IslandCheckpointManager) and self.step > 0:
            required = self.config.semi_sync.method != "none"
            self.checkpointer.restore_outer(self.step, self.method.restore, self.group.is_gateway, required)
        saved = self._is_complete()
        try:
            self._go_on(self.method.join(self.step))
            if not saved and self.step >= self.config.training.steps:  # only an exchange or a heal was left
                self.checkpointer.save(self.step, last_step=True)
        except Resumable as stopped:
            self.drained = True
            self.trace.state("resume", str(stopped))
        return super().batch_generator(data_iterable)

    def should_continue_training(self) -> bool:
        unfinished = not self.drained and self.step < self.config.training.steps
        if unfinished and self.group.any(self.drain.is_set()):
            self._stop_early()
        return not self.drained and super().should_continue_training()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        began = time.monotonic()
        self.trace.step = self.step
        self._go_on(self.method.inner_step(self.step, partial(self._attempt, data_iterator)))
        self.trial.after_step(began, (p for part in self.model_parts for p in part.parameters()))
        try:
            self._go_on(self.method.after_inner_step(self.step, self.tokens_per_step))
        except Resumable as stopped:
            self.drain.request(str(stopped))
        self.metrics_processor.end_step(time.monotonic() - began)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**batch)
        self.method.after_backward()
        return loss

    def train(self) -> None:
        super().train()
        self.finished = self._is_complete()
        if not self.finished and not self.drained:  # asked to stop in the very last exchange
            self.trace.state("resume", self.drain.reason)

    def close(self) -> None:
        if hasattr(self, "method"):
            self.method.leave("done" if self.finished else "drain" if self.drained else "failure")
            if self.finished:
                copies = self.parallel_dims.tp * self.parallel_dims.pp  # ranks that see the same tokens
                self.trace.event("end", tokens=self.ntokens_seen * self.group.size // copies)
                self.trace.state("done")
            self.trace.close()
        super().close()

    def _is_complete(self) -> bool:
        return self.step >= self.config.training.steps and self.method.complete()

    # ---- their parts -----------------------------------------------------------------------------------------------

    def _attempt(self, data_iterator: Iterator[Batch], step: int) -> None:
        if step != self.step:  # the run has moved on, and this island with it
            move_schedule(self.lr_schedulers, step - 1)
            self.step = self.trace.step = step
        seen = self.ntokens_seen
        try:
            super().train_step(data_iterator)
        except semi_sync.Discarded:
            self.ntokens_seen = seen
            raise

    def _go_on(self, step: int) -> None:
        """Go on after ``step``; the learning rate is that of the run's progress, not of this island's own steps."""
        if step != self.step or self.config.island.own_sync_every is not None:
            self.step = self.trace.step = step
            move_schedule(self.lr_schedulers, self.method.progress(step))

    def _stop_early(self) -> None:
        reason = self.drain.reason or "another rank was asked to stop"
        self.trace.event("drain", reason=reason, phase="inner step", deadline=None)
        self.drained = True
        self.method.pause()
        if self.step > 0 and not self.checkpointer.save_for_drain(self.step):  # type: ignore[attr-defined]
            reason += "; nothing saved: checkpoint.enable off, its load_only on, or weights not finite"
        self.trace.state("resume", reason)

    def _trace_checkpoint(self, path: str, seconds: float) -> None:
        durable = self.config.checkpoint.async_mode == "disabled"
        self.trace.event("checkpoint", path=path, seconds=seconds, durable=durable)
