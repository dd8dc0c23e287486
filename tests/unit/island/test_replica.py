"""One rank of a replica: when FSDP averages its gradients, what goes beside it, and the state that another rank can take."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.helpers import tiny
from torchtitan_diloco.island.replica import Replica, combine


def make_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


@pytest.fixture
def sharded():
    with tiny.single_rank():
        dist.init_process_group("gloo")
        model = make_model()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        yield model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def halve(tensor: torch.Tensor) -> None:
    tensor /= 2


def test_fsdp_averages_every_gradient_once_in_the_backward_pass(sharded):
    whole = [g.clone() for g in gradients(sharded)]
    assert Replica([sharded], []).hook(halve)
    for before, after in zip(whole, gradients(sharded), strict=True):
        torch.testing.assert_close(after, before / 2)


def test_where_a_unit_refuses_the_hook_no_unit_keeps_it_and_one_buffer_does_all(sharded):
    whole = [g.clone() for g in gradients(sharded)]
    set_hook, calls = FSDPModule.set_all_reduce_hook, []

    def refusing(self, hook, **options):
        calls.append(self)
        if len(calls) == 2:
            raise ValueError("not supported with multiple param groups")
        set_hook(self, hook, **options)

    with mock.patch.object(FSDPModule, "set_all_reduce_hook", refusing):
        replica = Replica([sharded], [])
        assert not replica.hook(halve)
    assert len(calls) == 2
    for before, after in zip(whole, gradients(sharded), strict=True):
        assert torch.equal(before, after)
    sizes: list[int] = []
    replica.average_gradients(lambda flat: (sizes.append(flat.numel()), halve(flat)))
    assert sizes == [sum(g.numel() for g in whole)]
    for before, parameter in zip(whole, sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), before / 2)


def test_with_several_backward_passes_or_without_fsdp_there_is_no_hook(sharded):
    assert not Replica([sharded], [], backwards=2).hook(halve)
    assert not Replica([make_model()], []).hook(halve)


def test_each_dtype_has_a_buffer_of_its_own():
    model = make_model()
    model[2].bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen: list[torch.dtype] = []
    Replica([model], []).average_gradients(lambda flat: (seen.append(flat.dtype), halve(flat)))
    assert sorted(map(str, seen)) == ["torch.bfloat16", "torch.float32"]
    assert all((p.grad == 0.5).all() for p in model.parameters())


def test_what_balances_experts_is_averaged_and_forgotten():
    layer = nn.Module()
    layer.register_buffer("tokens_per_expert_E", torch.tensor([3, 6]), persistent=False)
    replica = Replica([nn.Sequential(layer)], [])
    replica.average_routing(lambda counts: counts.mul_(2))
    assert layer.tokens_per_expert_E.tolist() == [6, 12]
    replica.forget_routing()
    assert layer.tokens_per_expert_E.tolist() == [0, 0]


def test_the_tensors_are_all_that_makes_the_next_step_in_one_order():
    def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            gradients(model)
            optimizer.step()
        return model, optimizer

    (source, its), (target, own) = trained(0, 3), trained(1, 0)
    sender, receiver = Replica([source], [its]), Replica([target], [own])
    assert sender.has_moments and not receiver.has_moments
    assert sender.layout() == receiver.layout() and sender.digest() != receiver.digest()
    pairs = list(zip(sender.tensors(moments=True), receiver.tensors(moments=True), strict=True))
    with torch.no_grad():
        for sent, received in pairs:
            received.copy_(sent)
    assert sender.digest() == receiver.digest()  # the buffers of the batch norm are part of it
    for model, optimizer in ((source, its), (target, own)):
        gradients(model)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    receiver.drop_moments()
    assert not receiver.has_moments
    assert len(receiver.tensors(moments=False)) < len(pairs)


def test_a_digest_is_of_every_bit_and_of_the_order_of_ranks():
    model = make_model()
    before = Replica([model], []).digest()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[2].bias[1] = torch.nextafter(changed[2].bias[1], torch.tensor(9.0))
    after = Replica([changed], []).digest()
    assert before == Replica([copy.deepcopy(model)], []).digest() != after
    assert combine([before, after]) != combine([after, before])
