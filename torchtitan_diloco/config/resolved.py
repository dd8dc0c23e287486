"""What loading a configuration gives."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco.config.problems import COMMAND_LINE
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

    def one_island(self) -> "Resolved":
        """This, if it is the configuration of one island. Raises UserError where [[islands]] leave open of which."""
        if self.config.islands and self.origins["island.id"] != COMMAND_LINE:
            ids = ", ".join(str(table.id) for table in self.config.islands)
            raise UserError(
                f"island.id: {self.path} has [[islands]]; say which one this is: --island.id N (there are {ids})"
            )
        return self
