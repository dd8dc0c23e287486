"""One rank's part of an island that is a replica of the others: its gradients, and all that makes its next step.

Islands have equal layouts, so rank r of each holds the same shards, and what one rank sends fits the other as it is.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torchtitan.components.optimizer.utils import init_optim_state

from torchtitan_diloco.island.parameters import canonical_tensors, local_part

Average = Callable[[torch.Tensor], None]
"""Replaces a tensor by its mean over the islands."""


@dataclass(slots=True)
class Replica:
    """model_parts, optimizers: of this rank. backwards: backward passes in one inner step."""

    model_parts: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    backwards: int = 1

    # ---- gradients -------------------------------------------------------------------------------------------------

    def hook(self, average: Average) -> bool:
        """Have FSDP average each unit's gradients while the backward pass goes on. False where it cannot.

        It cannot where a module has parameter groups of several meshes (expert parallelism: torch refuses the hook), or
        there is no FSDP. With several backward passes it must not: each would send a whole gradient.
        """
        units = [m for part in self.model_parts for m in part.modules() if isinstance(m, FSDPModule)]
        if self.backwards > 1 or not all(isinstance(part, FSDPModule) for part in self.model_parts):
            return False
        try:
            for unit in units:
                unit.set_all_reduce_hook(average)
        except ValueError:
            for unit in units:
                for group in unit._get_fsdp_state()._fsdp_param_groups:  # no public way back
                    group._all_reduce_hook = None
            return False
        return True

    def average_gradients(self, average: Average) -> None:
        """Average all gradients of this rank through one flat buffer for each dtype."""
        grads: dict[torch.dtype, list[torch.Tensor]] = {}
        for part in self.model_parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    grads.setdefault(parameter.grad.dtype, []).append(local_part(parameter.grad))
        for dtype in sorted(grads, key=str):
            flat = torch.cat([grad.reshape(-1) for grad in grads[dtype]])
            average(flat)
            offset = 0
            for grad in grads[dtype]:
                grad.copy_(flat[offset : offset + grad.numel()].view(grad.shape))
                offset += grad.numel()

    def average_routing(self, average: Average) -> None:
        """Average what the balance of mixture-of-experts layers is made of, so that it moves alike on all islands."""
        for counts in self._routing():
            means = counts.float()
            average(means)
            counts.copy_(means)

    def forget_routing(self) -> None:
        """The step is not taken: its tokens do not count."""
        for counts in self._routing():
            counts.zero_()

    def _routing(self) -> Iterator[torch.Tensor]:
        for part in self.model_parts:
            for name, buffer in part.named_buffers():
                if name.rpartition(".")[2] == "tokens_per_expert_E":
                    yield local_part(buffer)

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def has_moments(self) -> bool:
        return any(optimizer.state for optimizer in self.optimizers)

    def tensors(self, *, moments: bool) -> list[torch.Tensor]:
        """This rank's share of the parameters and trained buffers; with ``moments`` that of the optimizer state, which is
        made where there is none. In the same order on all islands. Drops the gradients.
        """
        found = [local_part(tensor) for _, tensor in canonical_tensors(self.model_parts)]
        for optimizer in self.optimizers if moments else ():
            optimizer.zero_grad(set_to_none=True)
            init_optim_state(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    found += [
                        local_part(state[k]) for k in sorted(state) if isinstance(state[k], torch.Tensor)
                    ]
        return found

    def drop_moments(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def layout(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
        """Name, whole shape, this rank's shape and dtype of each tensor: equal on ranks that fit each other."""
        return [
            (name, tuple(tensor.shape), tuple(local_part(tensor).shape), str(tensor.dtype))
            for name, tensor in canonical_tensors(self.model_parts)
        ]

    def digest(self) -> str:
        """SHA-256 of this rank's share of the parameters and trained buffers."""
        sha = hashlib.sha256()
        for _, tensor in canonical_tensors(self.model_parts):
            sha.update(_bytes_of(local_part(tensor)))
        return sha.hexdigest()

    def reshard(self) -> None:
        """Parameters were overwritten: FSDP must not go on with whole copies of the old ones."""
        for part in self.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def combine(digests: Iterable[str]) -> str:
    """One digest for the island from those of its ranks, in rank order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()
