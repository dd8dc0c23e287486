"""The run's fragments from its settings, and their values on disk for whoever wants to check the arithmetic."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_diloco.config.own import SemiSyncConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.outer.fragments import (
    Fragment,
    TensorSpec,
    balanced,
    by_layer,
    by_modules,
    whole_model,
)


def partition(config: SemiSyncConfig, specs: Sequence[TensorSpec]) -> tuple[Fragment, ...]:
    """Raises UserError where the model cannot be cut as the settings say."""
    explicit = config.module_fqns_per_fragment
    try:
        if explicit:
            return by_modules(specs, explicit)
        if config.fragments == 1:
            return whole_model(specs)
        if config.fragment_by == "tensor":
            return balanced(specs, config.fragments)
        return by_layer(specs, config.fragments, strided=config.fragment_by == "layer")
    except ValueError as error:
        setting = "module_fqns_per_fragment" if explicit else f"fragments = {config.fragments}"
        raise UserError(f"semi_sync.{setting}: {error}") from error


def dump(
    path: Path,
    fragments: Sequence[Fragment],
    flats: Sequence[tuple[int, torch.Tensor]],
    counts: Mapping[str, int],
) -> None:
    """Write fragments' values by tensor name; a range of rows is named ``name[start:stop]``. counts: as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        piece.name: view.contiguous() for index, flat in flats for piece, view in fragments[index].views(flat)
    }
    save_file(tensors, path, metadata={name: str(value) for name, value in counts.items()})
