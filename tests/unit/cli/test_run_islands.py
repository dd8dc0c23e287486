"""Two ways to say how many islands there are."""

from pathlib import Path

import pytest

from torchtitan_diloco.cli.run import main
from torchtitan_diloco.errors import UserError

QUICKSTART = Path(__file__).parents[3] / "train_configs" / "quickstart.toml"


@pytest.mark.parametrize("more", [["--semi_sync.num_islands", "5"], ["--semi-sync.num-islands=5"]])
def test_the_number_of_islands_is_said_once(more: list[str]) -> None:
    with pytest.raises(UserError, match=r"--islands and --semi_sync\.num_islands say the same thing"):
        main([str(QUICKSTART), "--islands", "2", *more])
