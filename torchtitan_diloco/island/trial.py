"""What is done to inner steps to try a run out: their pace, and faults that a chaos run plants in them."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from torchtitan_diloco.observe.injection import INJECT


class Trial:
    """Of one rank. pace_s: seconds that a step lasts at least. folder: where ``INJECT`` is looked for; None: nowhere."""

    def __init__(self, pace_s: float, folder: Path | None) -> None:
        self._pace_s, self._folder = pace_s, folder

    def after_step(self, began: float, parameters: Iterable[torch.Tensor]) -> None:
        """began: of the step, in ``time.monotonic``'s seconds."""
        if self._folder is not None and (self._folder / INJECT).exists():
            with suppress(
                OSError
            ):  # of several ranks that have seen it one or more obey, which makes no difference
                (self._folder / INJECT).unlink()
            poison(parameters)
        if (rest := began + self._pace_s - time.monotonic()) > 0:
            time.sleep(rest)


@torch.no_grad()
def poison(parameters: Iterable[torch.Tensor]) -> None:
    """Make the first value that this rank holds of each parameter NaN: the next loss is, whatever the batch."""
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel():
            local[(0,) * local.dim()] = float("nan")
