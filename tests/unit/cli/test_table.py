"""Words of the closing table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from torchtitan_diloco.cli.local.supervisor import Island
from torchtitan_diloco.cli.local.table import print_closing
from torchtitan_diloco.observe.reading import anchor_agreement


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([range(6), range(6)], "anchors are equal at slot 5\n"),
        ([range(6), range(8)], "anchors are equal at slot 5, the last that all of them hold\n"),
        (
            [range(6), range(6), range(0)],
            "anchors are equal at slot 5, the last that islands 0, 1 hold\n",
        ),
    ],
)
def test_equal_anchors_are_not_said_of_islands_that_ended_elsewhere(
    slots: list[range], said: str, tmp_path: Path
) -> None:
    islands = [Island(i, 1, tmp_path / f"island-{i}") for i in range(len(slots))]
    for island, committed in zip(islands, slots, strict=True):
        island.figures.digests = {slot: f"digest of {slot}" for slot in committed}
    agreement = anchor_agreement({island.number: island.figures for island in islands})
    print_closing(Console(file=(out := io.StringIO()), width=110), islands, agreement, tmp_path)
    assert said in out.getvalue()
