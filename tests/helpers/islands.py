"""The tiny model under our trainer, alone in its run, and under TorchTitan's; what came out, bit by bit."""

import contextlib
import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torchtitan.trainer import Trainer

from tests.helpers import tiny
from torchtitan_diloco.config.own import SemiSyncConfig, TransportConfig
from torchtitan_diloco.island.drain import DrainFlag
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.metrics import IslandMetrics
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.outer.fragments import whole_model
from torchtitan_diloco.trainer import DiLoCoTrainer


def config_of(method: str | None, folder: Path, *, sync_every: int = 1000, **options: Any) -> Any:
    """Configuration of TorchTitan's own trainer (``method`` None), or of ours, one island over the memory transport."""
    if method is None:
        return tiny.tiny_trainer_config(dump_folder=str(folder), **options)
    return tiny.tiny_trainer_config(
        DiLoCoTrainer.Config,
        dump_folder=str(folder),
        metrics=IslandMetrics.Config(log_freq=1, disable_color_printing=True),
        transport=TransportConfig(kind="memory"),
        semi_sync=SemiSyncConfig(method=method, sync_every=sync_every),
        **options,
    )


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Our trainer takes over signals; give them back to the test runner."""
    before = {number: signal.getsignal(number) for number in DrainFlag.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_the_end(config: Any) -> dict[str, Any]:
    """Train through the trainer's own loop: the logged losses and gradient norms, and a digest of the final weights."""
    with signals_kept():
        trainer: Trainer = tiny.build_trainer(config)
        logged: list[tuple[float, float]] = []
        log = trainer.metrics_processor.log

        def recording(
            step: int, average: float, largest: float, norm: float, *more: Any, **named: Any
        ) -> None:
            logged.append((float(average), float(norm)))
            log(step, average, largest, norm, *more, **named)

        trainer.metrics_processor.log = recording  # type: ignore[method-assign]
        with mock.patch("torchtitan.trainer.time.sleep"):  # upstream's two seconds at the end
            trainer.train()
        group = IslandGroup(60)
        parameters = IslandParameters(trainer.model_parts, group)
        (fragment,) = whole_model(list(parameters.specs.values()))
        flat = parameters.snapshot(fragment)
        trainer.close()
        group.close()
    weights = None if flat is None else hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"logged": logged, "weights": weights, "steps": trainer.step, "class": type(trainer).__name__}


def run_case(
    *, method: str | None, folder: str, options: dict[str, Any], sync_every: int = 1000
) -> dict[str, Any]:
    """``run_to_the_end`` as a case of a world of several ranks."""
    return run_to_the_end(config_of(method, Path(folder), sync_every=sync_every, **options))
