"""Weights that do not depend on how a model is sharded.

DTensor's random operators know CUDA-like devices only. On the CPU each rank would fill its own shard from the same
generator state, so that FSDP over two ranks gives a matrix whose second half repeats the first.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module


class WholeTensorInit:
    """Runs an initialiser of TorchTitan's ``param_init`` on the whole tensor and keeps this rank's shard of it.

    All ranks start from one seed and draw the same numbers, hence get the shards of the tensor a single rank would
    have. Costs one all-gather and one whole tensor in memory per parameter, once.
    """

    def __init__(self, init: Callable[[torch.Tensor], object]) -> None:
        self.init = init

    def __repr__(self) -> str:
        return f"WholeTensorInit({self.init!r})"

    def __call__(self, param: torch.Tensor) -> None:
        if not isinstance(param, DTensor):
            self.init(param)
            return
        # Starts from the present values, since an initialiser may skip a parameter or change a part of it only.
        whole = param.full_tensor().detach()
        self.init(whole)
        # src_data_rank=None: cut the local copy, send nothing.
        param.copy_(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))


def make_init_independent_of_sharding(spec: ModelSpec) -> None:
    """Wrap every initialiser in the model configuration, in place, with :class:`WholeTensorInit`."""
    for _, module, _, _ in spec.traverse(Module.Config, recurse=True):
        if module.param_init is not None:
            # A new dictionary: upstream shares one between modules, and between flavors.
            module.param_init = {
                name: init if isinstance(init, WholeTensorInit) else WholeTensorInit(init)
                for name, init in module.param_init.items()
            }
