"""Runs the real launcher over the fake trainer, in a process of its own: it takes signals and may be killed."""

import sys
from pathlib import Path

from torchtitan_diloco.cli.local.command import Launch, trainer_arguments
from torchtitan_diloco.cli.local.folder import DataIdentity
from torchtitan_diloco.cli.local.launch import Edges
from torchtitan_diloco.cli.run import main
from torchtitan_diloco.errors import UserError


def fake_command(launch: Launch) -> list[str]:
    here = Path(__file__).parent
    return [sys.executable, str(here / "fake_torchrun.py"), str(launch.ranks), *trainer_arguments(launch)]


if __name__ == "__main__":
    try:
        sys.exit(
            main(sys.argv[1:], Edges(command=fake_command, prepare=lambda config, ranks: DataIdentity()))
        )
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
