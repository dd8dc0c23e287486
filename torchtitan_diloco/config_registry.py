"""For TorchTitan's own entry point: ``torchrun ... -m torchtitan.train --module torchtitan_diloco --config quickstart``.

One function per shipped TOML file, under its name. TorchTitan's flags (``--training.steps 50``, ``--island.id 1``) then
apply on top, with the names that TorchTitan 0.3 gives them, which are not always those of the TOML.
"""

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan_diloco import assets
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.configure import trainer_config
from torchtitan_diloco.data.loader import CorpusDataLoader
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.trainer import DiLoCoTrainer

CONFIGS = Path(assets.__file__).parent / "configs"
"""The files of train_configs/, which links here lead to, so that an installed package has them."""


@dataclass(kw_only=True, slots=True)
class FlaggedConfig(DiLoCoTrainer.Config):
    """A configuration whose derived parts follow its settings, since flags change those after the TOML was read."""

    def __post_init__(self) -> None:
        DiLoCoTrainer.Config.__post_init__(self)  # super() does not work in a dataclass with slots
        if isinstance(self.dataloader, CorpusDataLoader.Config):
            self.dataloader.island_id = self.island.id
            self.dataloader.num_islands = self.semi_sync.num_islands
        # Upstream is not followed by the type checker, which then takes its fields for new ones.
        folder = Path(getattr(self, "dump_folder"))  # noqa: B009
        if re.fullmatch(r"island-\d+", folder.name):
            setattr(self, "dump_folder", str(folder.parent / f"island-{self.island.id}"))  # noqa: B010
        self.agreement = {key: _setting(self, key, value) for key, value in self.agreement.items()}


def _setting(config: Any, key: str, otherwise: Any) -> Any:
    """What ``config`` says under the dotted ``key`` of the TOML; ``otherwise`` where no flag can have changed it."""
    value = config
    for word in key.replace("data.", "dataloader.").split("."):
        if not hasattr(value, word):
            return otherwise
        value = getattr(value, word)
    return value


def _shipped(name: str) -> FlaggedConfig:
    try:
        config = trainer_config(load_config(CONFIGS / f"{name}.toml"))
    except UserError as error:
        # TorchTitan's entry point would print a stack trace.
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    return FlaggedConfig(**{f.name: getattr(config, f.name) for f in fields(config)})


def quickstart() -> FlaggedConfig:
    """A 6-million-parameter Llama 3 on the bundled text."""
    return _shipped("quickstart")


def llama3_8b() -> FlaggedConfig:
    """Llama 3 8B across several GPU clusters."""
    return _shipped("llama3_8b")
