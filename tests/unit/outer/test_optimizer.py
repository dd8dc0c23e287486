"""The outer step in pieces: the bits of the formula, whatever the piece, and no version is changed in place."""

import pytest
import torch

from torchtitan_diloco.outer import optimizer
from torchtitan_diloco.outer.optimizer import OuterSGD


def formula(o: OuterSGD, anchor, delta, momentum):
    """As OuterSGD's docstring has it, one operation at a time over whole tensors."""
    if not o.keeps_momentum:
        return anchor - delta * o.lr, None
    velocity = (torch.zeros_like(anchor) if momentum is None else momentum * o.momentum) + delta
    update = velocity * o.momentum + delta if o.nesterov else velocity
    return anchor - update * o.lr, velocity


@pytest.mark.parametrize("momentum", [True, False], ids=["later", "first step"])
@pytest.mark.parametrize("rule", [OuterSGD(0.7, 0.9, True), OuterSGD(0.7, 0.9), OuterSGD(1.0)])
def test_pieces_give_the_bits_of_whole_tensors(rule, momentum, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    anchor, delta, old = torch.randn(3, 10_001, generator=generator).mul_(1e-3).unbind()
    delta[:3] = torch.tensor([0.0, -0.0, 1e-40])
    before = anchor.clone(), old.clone()
    wanted, velocity = formula(rule, anchor, delta.clone(), old if momentum else None)
    new, kept = rule.step(anchor, delta, old if momentum else None)
    assert torch.equal(new.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(anchor, before[0]) and torch.equal(old, before[1])
    if velocity is None:
        assert kept is None
    else:
        assert torch.equal(kept.view(torch.int32), velocity.view(torch.int32))
