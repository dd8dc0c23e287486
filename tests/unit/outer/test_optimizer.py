"""The outer step piece by piece: the bits of the formula, whatever the pieces, and no version is changed in place."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
import xxhash

from torchtitan_diloco.outer import pieces
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.state import Advance, FragmentState, OuterState

NUMEL = 10_001


def formula(o: OuterSGD, anchor, delta, momentum):
    """As OuterSGD's docstring has it, one operation at a time over whole tensors."""
    if not o.keeps_momentum:
        return anchor - delta * o.lr, None
    velocity = (torch.zeros_like(anchor) if momentum is None else momentum * o.momentum) + delta
    update = velocity * o.momentum + delta if o.nesterov else velocity
    return anchor - update * o.lr, velocity


def in_pieces(delta: torch.Tensor, length: int) -> Merged:
    """A merged delta whose values are not there before they are asked for."""
    making = torch.full_like(delta, torch.nan)

    def made() -> Iterator[slice]:
        for start in range(0, delta.numel(), length):
            here = slice(start, min(start + length, delta.numel()))
            making[here] = delta[here]
            yield here

    return Merged(making, made())


def step(rule: OuterSGD, anchor: torch.Tensor, momentum: torch.Tensor | None, merged: Merged) -> Advance:
    fragments = whole_model([TensorSpec("w", (anchor.numel(),), anchor.dtype)])
    outer = OuterState.found(fragments, rule, [anchor])
    outer.states[0] = FragmentState(anchor, momentum, 1, "")
    return outer.outer_step(0, 0)(merged)


@pytest.mark.parametrize("momentum", [True, False], ids=["later", "first step"])
@pytest.mark.parametrize("rule", [OuterSGD(0.7, 0.9, True), OuterSGD(0.7, 0.9), OuterSGD(1.0)])
@pytest.mark.parametrize("length", [NUMEL, 4096, 1000, 999, 7], ids=str)
def test_pieces_give_the_bits_of_whole_tensors(rule, momentum, length, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    anchor, delta, old = torch.randn(3, NUMEL, generator=generator).mul_(1e-3).unbind()
    delta[:3] = torch.tensor([0.0, -0.0, 1e-40])
    before = anchor.clone(), old.clone()
    wanted, velocity = formula(rule, anchor, delta.clone(), old if momentum else None)
    made = step(rule, anchor, old if momentum else None, in_pieces(delta, length))
    assert torch.equal(made.anchor.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(anchor, before[0]) and torch.equal(old, before[1])
    if velocity is None:
        assert made.momentum is None
    else:
        assert made.momentum is not None
        assert torch.equal(made.momentum.view(torch.int32), velocity.view(torch.int32))
    assert made.digest == digest(wanted) and made.finite
    assert made.merged == xxhash.xxh3_128_hexdigest(delta.numpy().tobytes())


def test_an_anchor_has_the_documented_digest():
    values = torch.arange(5.0)
    assert digest(values) == hashlib.sha256(xxhash.xxh3_128_digest(values.numpy().tobytes())).hexdigest()
    assert digest(torch.empty(0)) == hashlib.sha256(xxhash.xxh3_128_digest(b"")).hexdigest()


@pytest.mark.parametrize("place", [0, 1500, NUMEL - 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_is_seen_in_any_piece(place, value, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    delta = torch.zeros(NUMEL)
    delta[place] = value
    assert not step(OuterSGD(0.7, 0.9, True), torch.zeros(NUMEL), None, in_pieces(delta, 512)).finite
