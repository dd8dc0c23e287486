"""Tensors that are at a worker. Here each is a name with shape and dtype, which all but arithmetic can treat as a tensor.

Nothing here says when a worker may let go of one: it is told so once nothing in this process refers to it any more.
"""

import weakref
from collections import deque
from typing import Any

import torch

from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState


class Handle:
    """What a tensor is called at a worker. place: where islands find it. read: when one last did (monotonic seconds)."""

    def __init__(self, key: str, place: str, dropped: "deque[str]") -> None:
        """dropped: the key is appended, in any thread, once nothing refers to the handle."""
        self.key, self.place = key, place
        self.read = 0.0
        weakref.finalize(self, dropped.append, key).atexit = False


class Far(torch.Tensor):
    """digest: of an anchor, as the worker has computed it."""

    handle: Handle
    digest: str


def far(handle: Handle, numel: int, dtype: torch.dtype, digest: str = "") -> Far:
    """A flat tensor at a worker; it takes no memory here."""
    tensor: Far = torch.Tensor._make_subclass(Far, torch.empty(numel, dtype=dtype, device="meta"))
    tensor.handle, tensor.digest = handle, digest
    return tensor


def digest_of(tensor: torch.Tensor) -> str:
    """As ``outer.digest.digest``, wherever the tensor is."""
    return tensor.digest if isinstance(tensor, Far) else digest(tensor)


def place_of(tensor: torch.Tensor) -> str:
    """Where islands find its bytes; empty where they ask this process for it."""
    return tensor.handle.place if isinstance(tensor, Far) else ""


def last_read(state: OuterState) -> float:
    """When an island last asked a worker for some of it (monotonic seconds)."""
    return max((t.handle.read for t in state.tensors().values() if isinstance(t, Far)), default=0.0)


class FarUpload(Upload):
    """What arrives at a worker, as this process last heard of it. refused: why the worker cannot take it in."""

    def __init__(self, handle: Handle, nbytes: int, kind: str, member: Member) -> None:
        """kind: "payload", "anchor" or "momentum"."""
        self.handle, self.nbytes, self.kind, self.member = handle, nbytes, kind, member
        self.data = far(handle, nbytes, torch.uint8)
        self.digest = self.refused = ""
        self._gaps = [(0, nbytes)]

    @property
    def place(self) -> str:
        return self.handle.place

    def check(self, offset: int, size: int) -> None:
        raise Refusal("gone", "these bytes go to a worker; ask again where it is")

    def missing(self) -> list[tuple[int, int]]:
        return list(self._gaps)

    def hear(self, told: dict[str, Any]) -> bool:
        """What the worker says of it; whether that is new."""
        before = self._gaps
        self._gaps = [(int(start), int(stop)) for start, stop in told["missing"]]
        self.digest, self.refused = str(told["digest"]), str(told["refused"])
        return self._gaps != before

    def values(self) -> torch.Tensor:
        return far(self.handle, self.nbytes // 4, torch.float32, self.digest)
