"""How parts are dealt to workers, and what stands for a tensor that is at one."""

import gc
from collections import deque

import torch

from torchtitan_diloco.hub.crew import deal
from torchtitan_diloco.hub.far import FarUpload, Handle, digest_of, far, place_of
from torchtitan_diloco.hub.parts import fragment_of
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.policy import Member


def test_parts_are_dealt_by_bytes_the_largest_first() -> None:
    assert deal([1000, 300, 700, 50], 2) == [0, 1, 1, 0]
    assert deal([5, 5, 5, 5], 2) == [0, 1, 0, 1]
    assert deal([7], 3) == [0]
    sizes = [97, 31, 60, 60, 12, 88, 45, 3, 71]
    owners = deal(sizes, 3)
    shares = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == k) for k in range(3)]
    assert max(shares) <= 4 / 3 * sum(sizes) / 3


def test_a_worker_is_told_to_let_go_once_nothing_refers_to_a_tensor() -> None:
    dropped: deque[str] = deque()
    anchor = far(Handle("a", "http://w/parts/a", dropped), 10, torch.float32, "its digest")
    assert (anchor.numel(), anchor.nbytes, anchor.shape, anchor.dtype) == (10, 40, (10,), torch.float32)
    assert place_of(anchor) == "http://w/parts/a" and digest_of(anchor) == "its digest"
    held = {"x": anchor}
    del anchor
    gc.collect()
    assert not dropped
    held.clear()
    gc.collect()
    assert list(dropped) == ["a"]


def test_what_was_brought_outlives_its_upload() -> None:
    dropped: deque[str] = deque()
    upload = FarUpload(Handle("u", ":1/parts/u", dropped), 40, "anchor", Member(0, "a"))
    assert upload.missing() == [(0, 40)] and not upload.complete
    assert upload.hear({"missing": [[8, 16]], "digest": "", "refused": ""})
    assert not upload.hear({"missing": [[8, 16]], "digest": "", "refused": ""})
    assert upload.hear({"missing": [], "digest": "d", "refused": ""}) and upload.complete
    anchor = upload.values()
    del upload
    gc.collect()
    assert not dropped and anchor.shape == (10,) and digest_of(anchor) == "d"
    del anchor
    gc.collect()
    assert list(dropped) == ["u"]


def test_tensors_here_are_as_they_were() -> None:
    tensor = torch.arange(4.0)
    assert place_of(tensor) == "" and digest_of(tensor) == digest(tensor)


def test_a_parts_name_tells_its_fragment() -> None:
    names = (
        "anchor.3",
        "momentum.12-v5-0a.safetensors",
        "residual.7[0:10]",
        "residual.7[0:10]-v1-f.safetensors",
    )
    assert [fragment_of(name) for name in names] == [3, 12, 7, 7]
