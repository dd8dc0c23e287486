"""Method ``none``: plain TorchTitan, one island, nothing exchanged."""

from typing import Any

import torch

from torchtitan_diloco.semi_sync.method import SemiSync, Setup, register_semi_sync


@register_semi_sync("none")
class NoSync(SemiSync):
    def __init__(self, setup: Setup) -> None:
        pass

    def join(self, step: int) -> int:
        return step

    def after_inner_step(self, step: int, tokens: int) -> int:
        return step

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {}

    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        pass

    def leave(self, reason: str) -> None:
        pass
