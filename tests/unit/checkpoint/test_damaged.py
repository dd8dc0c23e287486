"""A checkpoint that was damaged after it was complete: refused in one sentence that names its folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager, read_outer, write_outer
from torchtitan_diloco.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def load(folder: Path) -> None:
    manager = object.__new__(IslandCheckpointManager)  # without a trainer to load into
    manager.states = {}
    manager.dcp_load({"weight": torch.zeros(64)}, str(folder), from_hf=False, from_quantized=False)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "step-5"
    dcp.save({"weight": torch.ones(64)}, checkpoint_id=str(folder), no_dist=True)
    write_outer(folder, {"outer": {}}, {"anchor.0": torch.ones(64)})
    load(folder)
    return folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: truncate(next(step.glob("*.distcp"))),
        lambda step: next(step.glob("*.distcp")).unlink(),
        lambda step: (step / ".metadata").write_bytes(b""),
    ],
    ids=["truncated", "missing", "empty metadata"],
)
def test_an_islands_own_part(step: Path, damage: Callable[[Path], object]) -> None:
    damage(step)
    with pytest.raises(UserError) as caught:
        load(step)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"checkpoint.folder: {step} cannot be loaded (rank 0: ")
    assert line.endswith("; remove it to go on from an older one")


@pytest.mark.parametrize("file", ["outer.safetensors", "outer.json"])
def test_the_outer_part_truncated(step: Path, file: str) -> None:
    truncate(step / file)
    with pytest.raises(UserError, match=rf"^checkpoint\.folder: .*{file} .*remove .*step-5"):
        read_outer(step)


@pytest.mark.parametrize(
    "file, says", [("outer.safetensors", "does not match its hash"), ("outer.json", "is missing")]
)
def test_the_outer_part_missing(step: Path, file: str, says: str) -> None:
    (step / file).unlink()
    with pytest.raises(UserError, match=rf"^checkpoint\.folder: .*{file} {says}; remove .*step-5"):
        read_outer(step)
