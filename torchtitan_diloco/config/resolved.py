"""What loading a configuration gives."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco.config.problems import COMMAND_LINE, DEFAULT, ConfigError
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


@dataclass(slots=True)
class Resolved:
    """A configuration with where each value comes from."""

    config: RunConfig
    """Of the island that the command line names; of the run as a whole where there are [[islands]] and it names none."""
    origins: dict[str, str]
    """Dotted key -> "default", "base NAME", "FILE:LINE" or "command line"; for every key."""
    path: Path
    """The file as given."""
    notes: list[str]
    """What is worth knowing and not wrong."""

    def with_model(self) -> "Resolved":
        """This, if something says which model to train. Raises ConfigError where only the defaults do."""
        named = (self.origins[key] != DEFAULT for key in ("model.name", "model.flavor"))
        if not self.config.job.base and not any(named):
            raise ConfigError(
                [
                    f"{self.path}: model.name, model.flavor: neither is given, and nor is job.base; say which model to "
                    f'train, for instance [model] name = "{self.config.model.name}", flavor = "{self.config.model.flavor}"'
                ]
            )
        return self

    def one_island(self) -> "Resolved":
        """This, if it is the configuration of one island. Raises UserError where [[islands]] leave open of which."""
        if self.config.islands and self.origins["island.id"] != COMMAND_LINE:
            ids = ", ".join(str(table.id) for table in self.config.islands)
            raise UserError(
                f"island.id: {self.path} has [[islands]]; say which one this is: --island.id N (there are {ids})"
            )
        return self
