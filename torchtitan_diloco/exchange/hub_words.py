"""What the hub's transport keeps of its slots, and of the states it takes."""

from dataclasses import dataclass

import torch

from torchtitan_diloco.exchange.transport import Joined
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import OuterStep


@dataclass(slots=True)
class Offer:
    header: Header
    payload: torch.Tensor
    outer_step: OuterStep
    began: float
    withdrawn: bool = False
    merged: Upload | None = None  # as far as it has come


HUB_SOURCE = -1
"""In a heal event, in the place of an island's number."""


@dataclass(frozen=True, slots=True)
class Taken:
    """settled: what was taken holds all slots that this island takes no part in."""

    joined: Joined
    settled: bool
    version: int
