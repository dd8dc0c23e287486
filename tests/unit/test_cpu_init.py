"""Initial weights on the CPU are those of a single rank, whatever the sharding."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.common.param_init import skip_param_init

from tests.helpers import tiny
from torchtitan_diloco import cpu
from torchtitan_diloco.cpu.init import WholeTensorInit, make_init_independent_of_sharding


def initialisers(spec):
    from torchtitan.protocols.module import Module

    nodes = [module for _, module, _, _ in spec.traverse(Module.Config, recurse=True)]
    return [init for module in nodes for init in (module.param_init or {}).values()]


def test_every_initialiser_of_a_model_is_wrapped_once():
    spec = tiny.tiny_model_spec()
    before = initialisers(spec)
    make_init_independent_of_sharding(spec)
    make_init_independent_of_sharding(spec)
    after = initialisers(spec)
    assert len(before) == len(after) > 10
    assert all(isinstance(init, WholeTensorInit) for init in after)
    assert not any(isinstance(init.init, WholeTensorInit) for init in after)


def test_tables_that_upstream_shares_between_models_stay_as_they_are():
    make_init_independent_of_sharding(tiny.tiny_model_spec())
    assert not any(isinstance(init, WholeTensorInit) for init in initialisers(tiny.tiny_model_spec()))


def test_plain_tensor_is_initialised_as_without_the_wrapper():
    plain, wrapped = torch.empty(5, 3), torch.empty(5, 3)
    torch.manual_seed(0)
    nn.init.normal_(plain)
    torch.manual_seed(0)
    WholeTensorInit(nn.init.normal_)(wrapped)
    assert torch.equal(plain, wrapped)


def test_sharded_tensor_draws_the_numbers_of_a_plain_one_and_skipping_keeps_its_values():
    cpu.install()
    with tiny.single_rank():
        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (1,))
        param = DTensor.from_local(torch.zeros(5, 3), mesh, [Shard(0)])
        plain = torch.empty(5, 3)
        torch.manual_seed(0)
        nn.init.normal_(plain)
        torch.manual_seed(0)
        WholeTensorInit(nn.init.normal_)(param)
        assert torch.equal(param.full_tensor(), plain)
        WholeTensorInit(skip_param_init)(param)
        assert torch.equal(param.full_tensor(), plain)
