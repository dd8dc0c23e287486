"""TorchTitan's metrics with what a run of several islands needs: events, the last step, one TensorBoard folder."""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    _get_metrics_rank,
)

from torchtitan_diloco.observe.events import Trace


class IslandMetrics(MetricsProcessor):
    """Also logs the last step, and writes an ``inner`` event for every step it logs.

    The trainer sets ``trace``, ``last_step`` and ``tokens_per_step`` once it is built.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """TorchTitan's own fields."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        self.trace: Trace | None = None
        self.last_step = 0
        self.tokens_per_step = 0
        self._pending: dict[str, Any] | None = None
        self._seconds = 0.0
        self._steps = 0
        super().__init__(config, **arguments)

    def should_log(self, step: int) -> bool:
        return bool(super().should_log(step)) or step == self.last_step

    def _build_metric_logger(self, *, config: Config, **arguments: Any) -> BaseLogger:
        # Upstream names TensorBoard's folder by the minute of the start, so that every restart begins another curve.
        quiet: Any = replace(config, enable_tensorboard=False)  # type: ignore[call-arg]
        logger = super()._build_metric_logger(config=quiet, **arguments)
        rank = dist.get_rank()
        chosen = _get_metrics_rank(
            parallel_dims=arguments["parallel_dims"], pp_schedule=arguments["pp_schedule"]
        )
        if not config.enable_tensorboard or not (config.save_for_all_ranks or rank == chosen):
            return logger
        folder = os.path.join(arguments["dump_folder"], config.save_tb_folder)
        if config.save_for_all_ranks:
            folder = os.path.join(folder, f"rank_{rank}")
        container = logger if isinstance(logger, LoggerContainer) else LoggerContainer()
        container.add_logger(TensorBoardLogger(folder, arguments.get("tag")))
        return container

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        rates = [value for name, value in (extra_metrics or {}).items() if name.startswith("lr")]
        self._pending = {
            "loss": global_avg_loss if math.isfinite(global_avg_loss) else None,
            "tokens": self.tokens_per_step,
            "lr": rates[0] if rates else None,
        }

    def end_step(self, seconds: float) -> None:
        """An inner step is over, with its exchange, after ``seconds`` of wall time; its event can be written."""
        self._seconds += seconds
        self._steps += 1
        if self._pending is not None and self.trace is not None:
            self.trace.event("inner", **self._pending, seconds=self._seconds / self._steps)
            self._pending, self._seconds, self._steps = None, 0.0, 0
