"""Method ``none``: plain TorchTitan, one island, nothing exchanged."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_diloco.data.ledger import ranges
from torchtitan_diloco.semi_sync.method import SemiSync, Setup, register_semi_sync


@register_semi_sync("none")
class NoSync(SemiSync):
    """Keeps an account of samples all the same, where it is given a ledger.

    There are no slots: a sample is consumed once its inner step is done. Checkpoints are the links of the chain. A lineage
    is named by the positions, which say all about the samples before it, so the checkpoint needs to hold nothing more.
    """

    def __init__(self, setup: Setup) -> None:
        self._island, self._feed, self._ledger = setup.island, setup.feed, setup.ledger
        self._step = self._tokens = 0
        self._settled: dict[str, int] = {}  # positions at the last checkpoint

    def join(self, step: int) -> int:
        self._step = step
        if self._ledger is not None and self._feed is not None:
            self._ledger.begin({**self._feed.describe(), "slots": False}, self._feed.holds())
            self._settled = self._feed.positions()
            self._ledger.head(_lineage(self._settled), step + 1, self._tokens, self._settled)
        return step

    def after_inner_step(self, step: int, tokens: int) -> int:
        self._step, self._tokens = step, self._tokens + tokens
        if self._ledger is not None and self._feed is not None:
            self._ledger.read(ranges(self._settled, self._feed.positions()))
        return step

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self._ledger is not None and self._feed is not None:
            positions = self._feed.positions()
            if positions != self._settled:
                self._ledger.commit(
                    slot=self._step,
                    parent=_lineage(self._settled),
                    lineage=_lineage(positions),
                    tokens_total=self._tokens,
                    consumed={self._island: ranges(self._settled, positions)},
                    skipped={},
                    members={self._island: self._feed.holds()},
                )
                self._settled = positions
        return {}, {}

    def restore(self, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        pass

    def leave(self, reason: str) -> None:
        pass


def _lineage(positions: Mapping[str, int]) -> str:
    read = {name: position for name, position in sorted(positions.items()) if position}
    return hashlib.sha256(json.dumps(read).encode()).hexdigest() if read else ""
