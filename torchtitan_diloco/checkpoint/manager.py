"""TorchTitan's checkpoint manager, with the outer state of the run in the same folder.

``step-N/`` holds TorchTitan's DCP files (this island's model, inner optimizer, schedule and data position; read only by
this island) and, written before them, ``outer.safetensors`` and ``outer.json`` (canonical, the same on every island).
TorchTitan writes ``.metadata`` last, so a folder that has it has the outer part as well.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import MODEL, CheckpointManager

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.observe.events import write_json

logger = logging.getLogger(__name__)

State = tuple[dict[str, Any], dict[str, torch.Tensor]]


class IslandCheckpointManager(CheckpointManager):
    """The trainer sets ``outer_state`` (what to save; empty on ranks that hold none) and ``saved`` once it is built."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """TorchTitan's own fields."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        self.outer_state: Callable[[], State] = lambda: ({}, {})
        self.saved: Callable[[str, float], None] = lambda path, seconds: None
        self._drain_at: int | None = None
        self._saved_at: int | None = None
        super().__init__(config, **arguments)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step == (self._saved_at or 0):  # a step that was not taken after all
            return False
        return bool(super()._should_save(curr_step, last_step)) or (
            curr_step == self._drain_at and not self.load_only
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if not self._is_finite():
            # Older checkpoints are pruned for newer ones: this one would cost the last from which the island can go on.
            logger.warning("step %d is not saved: the model has values that are not finite", curr_step)
            return False
        began = time.monotonic()
        folder = Path(self._create_checkpoint_id(curr_step))
        description, tensors = self.outer_state()
        if description:
            write_outer(folder, description, tensors)
        saved = bool(super()._save(curr_step, last_step))
        if saved:
            self._saved_at = curr_step
            self.saved(str(folder), time.monotonic() - began)
        return saved

    @torch.no_grad()
    def _is_finite(self) -> bool:
        """Whether all parameters and buffers of the model are, on all ranks; the same answer on each."""
        flag, device = True, torch.device("cpu")
        for part in self.states[MODEL].model:
            for tensor in (*part.parameters(), *part.buffers()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                device = local.device
                if local.is_floating_point() and flag:
                    flag = bool(torch.isfinite(local).all())
        if not (dist.is_available() and dist.is_initialized()):
            return flag
        agreed = torch.tensor(int(flag), device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    def save_for_drain(self, step: int) -> bool:
        """Save ``step`` now, whatever the interval, and wait until it is on disk. True if it is (which a NaN forbids)."""
        if not self.enable or self.load_only:
            return False
        if self._saved_at != step:
            self._drain_at = step
            self.save(step)
        self.maybe_wait_for_saving()
        return self._saved_at == step

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, *arguments: Any, **named: Any) -> None:
        """As upstream. Raises UserError, on all ranks, where some part of it is damaged, missing, or of another model."""
        try:
            super().dcp_load(state_dict, checkpoint_id, *arguments, **named)
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
            what = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            raise UserError(
                f"checkpoint.folder: {checkpoint_id} cannot be loaded (rank {rank}: {what}); remove it to go on from an "
                "older one"
            ) from error

    def load_outer(self, step: int, tensors: bool) -> State | None:
        """The outer state saved at ``step`` (with its tensors, where this rank needs them); None where there is none.

        Raises UserError when it is damaged.
        """
        if not self.enable:
            return None
        return read_outer(Path(self._create_checkpoint_id(step)), tensors)

    def restore_outer(
        self,
        step: int,
        restore: Callable[[dict[str, Any], dict[str, torch.Tensor]], None],
        tensors: bool,
        required: bool,
    ) -> None:
        """Call ``restore`` with what ``load_outer`` finds. Raises UserError where that does not fit, or is missing."""
        saved = self.load_outer(step, tensors)
        if saved is None:
            if required:
                raise UserError(
                    f"checkpoint.folder: step-{step} has no outer state (it is not a checkpoint of this method); "
                    "choose another job.name, or another checkpoint.load_step"
                )
            return
        try:
            restore(*saved)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"checkpoint.folder: the outer state of step-{step} does not fit: {error}"
            ) from error


def write_outer(folder: Path, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the outer part of a checkpoint: the tensors first, then the description with their hash."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "outer.safetensors"
    temporary = target.with_suffix(".tmp")
    save_file(tensors, temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(temporary, target)
    write_json(folder / "outer.json", {**description, "sha256": sha256})


def read_outer(folder: Path, tensors: bool = True) -> State | None:
    """What ``write_outer`` wrote. Raises UserError when the tensors are missing or do not match their hash."""
    try:
        description = json.loads((folder / "outer.json").read_text())
    except FileNotFoundError:
        if (folder / "outer.safetensors").exists():
            raise UserError(
                f"checkpoint.folder: {folder}/outer.json is missing; remove {folder} to go on from an older one"
            ) from None
        return None
    except ValueError as error:
        raise UserError(
            f"checkpoint.folder: {folder}/outer.json is damaged ({error}); remove {folder} to go on from an older one"
        ) from error
    expected = description.pop("sha256", None)
    if not tensors:
        return description, {}
    target = folder / "outer.safetensors"
    try:
        with open(target, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        sha256 = "nothing"
    if sha256 != expected:
        raise UserError(
            f"checkpoint.folder: {target} does not match its hash; remove {folder} to go on from an older one"
        )
    return description, load_file(target)
